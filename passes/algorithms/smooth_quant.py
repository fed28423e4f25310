"""Move outlier channels of a linear's input into its weight, before q/dq are made."""

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from pt2e_quant.core.errors import module_path
from pt2e_quant.core.provenance import FloatRecord, provenance_of
from pt2e_quant.core.specs import Q_ANNOTATION_KEY
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.ops import LINEAR, argument, aten, is_call
from pt2e_quant.graph.pipeline import Note, PassResult, graph_pass
from pt2e_quant.observers.static.channel_statistics import ChannelStatisticsObserver
from pt2e_quant.passes.algorithms.channel_scales import ChannelScale, choose_channel_scale
from pt2e_quant.passes.algorithms.observed_linears import (
    LinearBias,
    LinearWeight,
    bias_of,
    divide_rows,
    linear_behind,
    observed_with_statistics,
    weight_of,
)

__all__ = ["smooth_quant"]

LEAST_GAIN = 1.5
"""By what factor the error must fall for a multiplication at run time to be worth it."""
LEAST_GAIN_FOLDED = 1.1
"""The same where the scale goes into a constant that is there anyway."""


@dataclass(frozen=True, slots=True)
class _Constants:
    """Constant factors and offsets of the input's producer, which take the scale themselves."""

    producer: Node
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class _Rows:
    """The output channels of a linear right before: they take the scale."""

    weight: LinearWeight
    bias: LinearBias | None


@graph_pass()
def smooth_quant(gm: GraphModule) -> PassResult:
    """Divide a linear's input by a scale per channel, and multiply its weight by it.

    Runs on a prepared and calibrated graph, at inputs under a ChannelStatisticsObserver. The
    scale is chosen from calibration statistics alone (`channel_scales`); it goes into the layer
    norm, the constant factor or the linear (with relu) that makes the input where nothing else
    reads that, else it is a multiplication of its own.

    Before:  y = linear(observe(x), w)
    After:   y = linear(observe(x * (1 / s)), w * s)
    """
    editor = Editor(gm)
    sites, notes = observed_with_statistics(gm)
    for node, observer in sites:
        linears = [user for user in node.users if _reads_as_input(user, node)]
        if not linears:
            continue  # the observer of an output
        notes.append(Note(linears[0].name, *_smooth(editor, node, observer, linears)))
    editor.finish()
    return PassResult(changed=editor.changed, notes=tuple(notes))


def _reads_as_input(user: Node, node: Node) -> bool:
    return is_call(user, LINEAR) and argument(user, "input") is node


def _smooth(
    editor: Editor, node: Node, observer: ChannelStatisticsObserver, linears: list[Node]
) -> tuple[str, bool]:
    """(what was done or why nothing, whether it was declined)."""
    source = node.args[0]
    assert isinstance(source, Node)
    if len(linears) < len(node.users):
        return "it is read by more than linears", True
    if observer.scalings:
        return "it was scaled before", True
    fold = _fold_target(editor.gm, source, node)
    if fold is None and _is_quantized_output(source):
        return f"{source.name} is computed in integers", True
    weights = [weight_of(editor.gm, linear) for linear in linears]
    for weight in weights:
        if isinstance(weight, str):
            return weight, True
    found = [w for w in weights if isinstance(w, LinearWeight)]
    statistics = observer.statistics()
    if statistics is None:
        return "the calibrated tensors differ in their last axis, or there were none", True
    choice = choose_channel_scale(
        statistics,
        weight=torch.cat([w.value.float() for w in found]),
        least_gain=LEAST_GAIN if fold is None else LEAST_GAIN_FOLDED,
    )
    if choice is None:
        return "no channel scale lowers the expected error enough", True
    choice = choice.exact_in(source.meta["val"].dtype)
    for weight in found:
        weight.rebind(editor, weight.value * choice.factors)
    _divide(editor, node, source, fold, choice)
    observer.scale_channels(1 / choice.factors, choice.step)
    return choice.step, False


def _is_quantized_output(node: Node) -> bool:
    annotation = node.meta.get(Q_ANNOTATION_KEY)
    return getattr(annotation, "output_qspec", None) is not None


def _fold_target(gm: GraphModule, source: Node, observer_node: Node) -> _Constants | _Rows | None:
    """What takes the scale in place of a multiplication, if there is such."""
    if set(source.users) != {observer_node}:
        return None
    if (linear := linear_behind(source)) is not None:
        weight, bias = weight_of(gm, linear), bias_of(gm, linear)
        if isinstance(weight, str) or isinstance(bias, str) or len(linear.users) > 1:
            return None
        return _Rows(weight, bias)
    if _is_quantized_output(source):
        return None
    if is_call(source, (aten.layer_norm.default,)):
        places = [argument(source, "weight"), argument(source, "bias")]
        if places[0] is None or len(argument(source, "normalized_shape")) != 1:
            return None
    elif is_call(source, (aten.mul.Tensor,)):
        places = [a for a in source.all_input_nodes if a.op == "get_attr"]
    else:
        return None
    constants = tuple(place for place in places if place is not None)
    width = source.meta["val"].shape[-1]
    for constant in constants:
        value = constant_of(gm, constant) if constant.op == "get_attr" else None
        if value is None or value.numel() != width or value.shape[-1] != width:
            return None
    return _Constants(source, constants) if constants else None


def _divide(
    editor: Editor,
    node: Node,
    source: Node,
    fold: _Constants | _Rows | None,
    choice: ChannelScale,
) -> None:
    if isinstance(fold, _Rows):
        divide_rows(editor, fold.weight, fold.bias, choice.factors)
    elif fold is not None:
        for constant in fold.nodes:
            value = constant_of(editor.gm, constant)
            assert value is not None  # _fold_target has read it
            divided = (value / choice.factors).to(value.dtype)
            new = editor.rebind(constant, divided, reader=fold.producer)
            fold.producer.replace_input_with(constant, new)
    else:
        _multiply(editor, node, source, choice)


def _multiply(editor: Editor, node: Node, source: Node, choice: ChannelScale) -> None:
    first = next(iter(node.users))
    owner = module_path(first)
    name = f"{owner}.input_scale" if owner else "input_scale"
    value = source.meta["val"]
    factor = editor.constant(name, (1 / choice.factors).to(value.dtype), like=first)
    scaled = editor.call(aten.mul.Tensor, source, factor, like=first, before=node, val=value)
    node.replace_input_with(source, scaled)
    provenance_of(editor.gm).floats.append(
        FloatRecord(
            node=scaled.name,
            op="aten.mul",
            module=owner,
            reason="smooth_quant put it before a quantize, to spare outlier channels",
            size=factor.meta["val"].numel() * factor.meta["val"].element_size(),
        )
    )
