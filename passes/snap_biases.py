"""Round float biases to the accumulator's steps, as an integer kernel will."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.core.dtypes import info
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
    sites = [
        _Site(node, bias, value, *operands)
        for node in gm.graph.nodes
        if is_call(node, _GEMMS)
        and isinstance(bias := argument(node, "bias"), Node)
        and (value := _float_constant(gm, bias)) is not None
        and (operands := _operands(gm, node)) is not None
    ]
    editor, notes = Editor(gm), []
    for site, snapped in zip(sites, _snapped(sites), strict=True):
        if snapped is None or torch.equal(snapped, site.value):
            continue
        held = editor.rebind(site.bias, snapped, reader=site.node)
        if held is not site.bias:
            site.node.replace_input_with(site.bias, held)
        text = f"{site.bias.target}: rounded to the accumulator's step"
        notes.append(Note(site.node.name, text))
    return PassResult(editor.finish(), tuple(notes))


@dataclass(frozen=True, slots=True)
class _Site:
    """A convolution or linear with a constant bias.

    Args:
        node: the call.
        bias: the node of its bias.
        value: what that holds.
        activation: qparams of the input, of one scale.
        weight: qparams of the weight, of one scale or one for each output.
    """

    node: Node
    bias: Node
    value: Tensor
    activation: QParams
    weight: QParams


def _float_constant(gm: GraphModule, bias: Node) -> Tensor | None:
    value = constant_of(gm, bias) if bias.op == "get_attr" else None
    return value if value is not None and value.is_floating_point() else None


def _operands(gm: GraphModule, node: Node) -> tuple[QParams, QParams] | None:
    """The qparams of input and weight where both are integers and give each output one step."""
    found = []
    for name in ("input", "weight"):
        operand = argument(node, name)
        if not isinstance(operand, Node) or kind_of_qdq(operand) not in STATIC_KINDS:
            return None
        if not is_dequantize(operand):
            return None
        found.append(read_qparams(gm, operand))
    activation, weight = found
    return (activation, weight) if activation.is_per_tensor and weight.group_size is None else None


def _snapped(sites: Sequence[_Site]) -> list[Tensor | None]:
    """Each bias on its steps, those with a step for each output in one computation."""
    found: dict[int, Tensor] = {}
    along = [i for i, site in enumerate(sites) if _is_along(site)]
    if along:
        joined = [sites[i] for i in along]
        lengths = [site.value.numel() for site in joined]
        steps = torch.cat([bias_qparams(s.activation, s.weight).scale for s in joined])
        values = torch.cat([site.value.to(torch.float32) for site in joined])
        made = fake_quantize(values, _steps(steps)).split_with_sizes(lengths)
        # Clones: each becomes a constant of its own.
        found = {i: m.to(sites[i].value.dtype).clone() for i, m in zip(along, made, strict=True)}
    for i, site in enumerate(sites):
        if i not in found:
            step = bias_qparams(site.activation, site.weight)
            if step.scale.numel() in (1, site.value.numel()):
                found[i] = fake_quantize(site.value, step)
    return [found.get(i) for i in range(len(sites))]


def _is_along(site: _Site) -> bool:
    is_vector = site.value.dim() == 1 and site.value.device.type == "cpu"
    return is_vector and site.weight.scale.shape == site.value.shape and site.weight.is_per_channel


def _steps(scale: Tensor) -> QParams:
    limits = info(torch.int32)
    return QParams(
        scale=scale,
        zero_point=torch.zeros_like(scale, dtype=torch.int32),
        quant_min=limits.quant_min,
        quant_max=limits.quant_max,
        dtype=torch.int32,
        axis=0,
    )
