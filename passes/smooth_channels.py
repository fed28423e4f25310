"""Move outlier channels of a linear's input into its weight, before q/dq are made."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.core.errors import module_path
from pt2e_quant.core.provenance import FloatRecord, provenance_of
from pt2e_quant.core.specs import Q_ANNOTATION_KEY
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import attribute, constant_of
from pt2e_quant.graph.ops import LINEAR, argument, aten, is_call
from pt2e_quant.graph.pipeline import Note, PassResult, graph_pass
from pt2e_quant.observers.base import UniformQuantizationObserverBase
from pt2e_quant.observers.channel_statistics import ChannelStatisticsObserver
from pt2e_quant.observers.minmax import MinMaxObserver, PerChannelMinMaxObserver
from pt2e_quant.passes.channel_scales import ChannelScale, choose_channel_scale

__all__ = [
    "LinearWeight",
    "observed_with_statistics",
    "smooth_channels",
    "weight_of",
]

LEAST_GAIN = 1.5
"""By what factor the error must fall for a multiplication at run time to be worth it."""
LEAST_GAIN_FOLDED = 1.1
"""The same where the scale goes into a constant that is there anyway."""


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """The weight of one linear in a prepared graph.

    Args:
        linear: the call.
        constant: the `get_attr` node that holds it.
        observer_node: the node that observes it.
        observer: its observer.
        value: float[out, in].
    """

    linear: Node
    constant: Node
    observer_node: Node
    observer: UniformQuantizationObserverBase
    value: Tensor

    def rebind(self, editor: Editor, value: Tensor) -> None:
        """Give the linear a new weight, and let its observer see that one instead."""
        value = value.to(self.value.dtype)
        new = editor.rebind(self.constant, value, reader=self.observer_node)
        self.observer_node.replace_input_with(self.constant, new)
        self.observer.reset_min_max_vals()
        self.observer(value)


def weight_of(gm: GraphModule, linear: Node) -> LinearWeight | str:
    """The weight of a linear, or the reason why it cannot be changed."""
    node = argument(linear, "weight")
    if node.op != "call_module":
        return f"the weight of {linear.name} is not observed"
    observer = attribute(gm, str(node.target))
    constant = node.args[0]
    if not isinstance(observer, (MinMaxObserver, PerChannelMinMaxObserver)):
        return f"{type(observer).__name__} of the weight of {linear.name} cannot start again"
    if constant.op != "get_attr" or set(constant.users) != {node} or set(node.users) != {linear}:
        return f"the weight of {linear.name} has other readers"
    value = constant_of(gm, constant)
    if value is None:
        return f"the weight of {linear.name} is no constant"
    return LinearWeight(linear, constant, node, observer, value)


def observed_with_statistics(
    gm: GraphModule,
) -> tuple[list[tuple[Node, ChannelStatisticsObserver]], list[Note]]:
    """The nodes that alone belong to a ChannelStatisticsObserver; a note where there are more."""
    nodes: dict[ChannelStatisticsObserver, list[Node]] = {}
    for node in gm.graph.nodes:
        if node.op == "call_module":
            observer = attribute(gm, str(node.target))
            if isinstance(observer, ChannelStatisticsObserver):
                nodes.setdefault(observer, []).append(node)
    shared = [
        Note(n.name, f"its range is shared by {len(places)} tensors", skipped=True)
        for places in nodes.values()
        if len(places) > 1
        for n in places[:1]
    ]
    return [(places[0], o) for o, places in nodes.items() if len(places) == 1], shared


@graph_pass()
def smooth_channels(gm: GraphModule) -> PassResult:
    """Divide a linear's input by a scale per channel, and multiply its weight by it.

    Runs on a prepared and calibrated graph, at inputs under a ChannelStatisticsObserver. The
    scale is chosen from calibration statistics alone (`channel_scales`); it goes into the layer
    norm or the constant factor that makes the input where nothing else reads that, else it is a
    multiplication of its own.

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
    if _is_quantized_output(source):
        return f"{source.name} is computed in integers", True
    weights = [weight_of(editor.gm, linear) for linear in linears]
    for weight in weights:
        if isinstance(weight, str):
            return weight, True
    found = [w for w in weights if isinstance(w, LinearWeight)]
    statistics = observer.statistics()
    if statistics is None:
        return "the calibrated tensors differ in their last axis, or there were none", True
    fold = _fold_target(editor.gm, source, node)
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


def _fold_target(gm: GraphModule, source: Node, observer_node: Node) -> tuple[Node, ...] | None:
    """The constants that take the scale in place of a multiplication, if there are such."""
    if set(source.users) != {observer_node}:
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
    return constants or None


def _divide(
    editor: Editor,
    node: Node,
    source: Node,
    fold: tuple[Node, ...] | None,
    choice: ChannelScale,
) -> None:
    reciprocal = 1 / choice.factors
    for constant in fold or ():
        value: Any = constant_of(editor.gm, constant)
        new = editor.rebind(constant, (value * reciprocal).to(value.dtype), reader=source)
        source.replace_input_with(constant, new)
    if fold is not None:
        return
    first = next(iter(node.users))
    owner = module_path(first)
    name = f"{owner}.input_scale" if owner else "input_scale"
    factor = editor.constant(name, reciprocal.to(source.meta["val"].dtype), like=first)
    scaled = editor.call(
        aten.mul.Tensor, source, factor, like=first, before=node, val=source.meta["val"]
    )
    node.replace_input_with(source, scaled)
    provenance_of(editor.gm).floats.append(
        FloatRecord(
            node=scaled.name,
            op="aten.mul",
            module=owner,
            reason="smooth_channels put it before a quantize, to spare outlier channels",
            size=factor.meta["val"].numel() * factor.meta["val"].element_size(),
        )
    )
