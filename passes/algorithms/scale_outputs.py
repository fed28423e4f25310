"""Quantize the outlier channels of a linear's output on steps of their own."""

from torch.fx import GraphModule, Node

from pt2e_quant.core.errors import module_path
from pt2e_quant.core.provenance import FloatRecord, provenance_of
from pt2e_quant.core.specs import Q_ANNOTATION_KEY
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.ops import aten
from pt2e_quant.graph.pipeline import Note, PassResult, graph_pass
from pt2e_quant.observers.static.channel_statistics import ChannelStatisticsObserver
from pt2e_quant.passes.algorithms.channel_scales import ChannelScale, choose_channel_scale
from pt2e_quant.passes.algorithms.observed_linears import (
    bias_of,
    divide_rows,
    linear_behind,
    observed_with_statistics,
    weight_of,
)

__all__ = ["scale_outputs"]

LEAST_GAIN = 2.0
"""By what factor the error must fall for a multiplication at run time to be worth it."""


@graph_pass()
def scale_outputs(gm: GraphModule) -> PassResult:
    """Divide a linear's rows by a scale per channel, and multiply its dequantized output by it.

    Runs on a prepared and calibrated graph, at outputs under a ChannelStatisticsObserver that
    are read in float. The rows' own weight scales absorb the division, so only the output's
    rounding changes. A relu between the linear and its quantize may stay: relu(y / s) * s is
    relu(y) for s > 0. The scale is chosen from calibration statistics alone (`channel_scales`).

    Before:  z = observe(linear(x, w, b))
    After:   z = observe(linear(x, w / s, b / s)) * s
    """
    editor = Editor(gm)
    sites, notes = observed_with_statistics(gm)
    for node, observer in sites:
        linear = linear_behind(_source(node))
        if linear is not None:
            notes.append(Note(linear.name, *_scale(editor, node, observer, linear)))
    editor.finish()
    return PassResult(changed=editor.changed, notes=tuple(notes))


def _source(node: Node) -> Node:
    source = node.args[0]
    assert isinstance(source, Node)
    return source


def _scale(
    editor: Editor, node: Node, observer: ChannelStatisticsObserver, linear: Node
) -> tuple[str, bool]:
    """(what was done or why nothing, whether it was declined)."""
    if observer.scalings:
        return "it was scaled before", True
    if len(linear.users) > 1:
        return f"{linear.name} has other readers", True
    reader = next((user for user in node.users if Q_ANNOTATION_KEY in user.meta), None)
    if reader is not None:
        return f"{reader.name} reads it in integers", True
    weight = weight_of(editor.gm, linear)
    if isinstance(weight, str):
        return weight, True
    bias = bias_of(editor.gm, linear)
    if isinstance(bias, str):
        return bias, True
    statistics = observer.statistics()
    if statistics is None:
        return "the calibrated tensors differ in their last axis, or there were none", True
    choice = choose_channel_scale(statistics, least_gain=LEAST_GAIN)
    if choice is None:
        return "no channel scale lowers the expected error enough", True
    choice = choice.exact_in(node.meta["val"].dtype)
    divide_rows(editor, weight, bias, choice.factors)
    _multiply_back(editor, node, linear, choice)
    observer.scale_channels(1 / choice.factors, choice.step)
    return choice.step, False


def _multiply_back(editor: Editor, node: Node, linear: Node, choice: ChannelScale) -> None:
    owner = module_path(linear)
    name = f"{owner}.output_scale" if owner else "output_scale"
    value = node.meta["val"]
    factor = editor.constant(name, choice.factors.to(value.dtype), like=linear)
    scaled = editor.call(aten.mul.Tensor, node, factor, like=linear, after=node, val=value)
    editor.replace(node, scaled, except_in=[scaled])
    provenance_of(editor.gm).floats.append(
        FloatRecord(
            node=scaled.name,
            op="aten.mul",
            module=owner,
            reason="scale_outputs put it after a dequantize, to give outlier channels their steps",
            size=factor.meta["val"].numel() * factor.meta["val"].element_size(),
        )
    )
