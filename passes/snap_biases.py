"""Round float biases to the accumulator's steps, as an integer kernel will."""

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.core.qdq import STATIC_KINDS, is_dequantize, kind_of_qdq, read_qparams
from pt2e_quant.core.qparams import QParams, bias_qparams, fake_quantize
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.ops import CONV, CONV_TRANSPOSE, LINEAR, Family, argument, is_call
from pt2e_quant.graph.pipeline import Note, PassResult, graph_pass

__all__ = ["snap_biases"]

_GEMMS: Family = (*CONV, *CONV_TRANSPOSE, *LINEAR)


@graph_pass()
def snap_biases(gm: GraphModule) -> PassResult:
    """Make each float bias of an integer convolution or linear a multiple of its step.

    Before:  linear(dq(x_q), dq(w_q), b)
    After:   linear(dq(x_q), dq(w_q), b'),   b' = round(b / step) * step,   step = scale_x * scale_w

    A runtime that takes float biases rounds them to int32 on this step itself. Doing so here
    makes its rounding the identity: without, one output in thousands is off by one step, and
    every layer behind makes more of it. The bias stays float: no node is added.
    """
    editor = Editor(gm)
    notes = []
    for node in [n for n in gm.graph.nodes if is_call(n, _GEMMS)]:
        bias = argument(node, "bias")
        step = _step(gm, node)
        if not isinstance(bias, Node) or step is None:
            continue
        value = constant_of(gm, bias)
        if value is None or bias.op != "get_attr" or not _fits(value, step):
            continue
        snapped = fake_quantize(value, step)
        if torch.equal(snapped, value):
            continue
        held = editor.rebind(bias, snapped, reader=node)
        if held is not bias:
            node.replace_input_with(bias, held)
        notes.append(Note(node.name, f"{bias.target}: rounded to the accumulator's step"))
    return PassResult(editor.finish(), tuple(notes))


def _step(gm: GraphModule, node: Node) -> QParams | None:
    """The bias's qparams where both operands are integers with constant qparams."""
    found = []
    for name in ("input", "weight"):
        operand = argument(node, name)
        if not isinstance(operand, Node) or not is_dequantize(operand):
            return None
        if kind_of_qdq(operand) not in STATIC_KINDS:
            return None
        found.append(read_qparams(gm, operand))
    activation, weight = found
    if not activation.is_per_tensor or weight.group_size is not None:
        return None  # no one step for each output
    return bias_qparams(activation, weight)


def _fits(bias: Tensor, step: QParams) -> bool:
    return bias.is_floating_point() and step.scale.numel() in (1, bias.numel())
