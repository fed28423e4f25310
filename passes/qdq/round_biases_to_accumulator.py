"""Round float biases to the accumulator's steps, as an integer kernel will."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.core.dtypes import info
from pt2e_quant.core.qdq import QdqKind, is_dequantize, kind_of_qdq, read_qparams
from pt2e_quant.core.qparams import QParams, fake_quantize
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.ops import CONV, CONV_TRANSPOSE, LINEAR, Overloads, argument, is_call
from pt2e_quant.graph.pipeline import Note, PassResult, graph_pass

BIAS_BELOW = 2.0**30
"""Half of int32's range, in steps; the rest is for the products that are added to a bias."""

_GEMMS: Overloads = (*CONV, *CONV_TRANSPOSE, *LINEAR)


@graph_pass(needs=(), gives=())
def round_biases_to_accumulator(gm: GraphModule) -> PassResult:
    """Make each float bias of an integer convolution or linear a multiple of its step.

    Before:  linear(dq(x_q), dq(w_q), b)
    After:   linear(dq(x_q), dq(w_q), b'),   b' = round(b / step) * step,   step = scale_x * scale_w

    Runtimes that take float biases round them to int32 on this step. Rounded here, they do not
    change there. Otherwise one output in thousands differs by one step from the q/dq graph, and
    each further layer amplifies that. The bias stays float: no node is added.
    """
    sites = [
        _Site(node, bias, value, *step)
        for node in gm.graph.nodes
        if is_call(node, _GEMMS)
        and isinstance(bias := argument(node, "bias"), Node)
        and (value := _float_constant(gm, bias)) is not None
        and (step := _step(gm, node)) is not None
    ]
    editor, notes = Editor(gm), []
    for site, rounded in zip(sites, _rounded(sites), strict=True):
        if rounded is None or torch.equal(rounded, site.value):
            continue
        held = editor.rebind(site.bias, rounded, reader=site.node)
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
        activation_scale: the input's one scale.
        weight_scale: the weight's, of one element or one for each output.
        is_along: whether the weight has an axis of scales.
    """

    node: Node
    bias: Node
    value: Tensor
    activation_scale: float
    weight_scale: Tensor
    is_along: bool


def _float_constant(gm: GraphModule, bias: Node) -> Tensor | None:
    value = constant_of(gm, bias) if bias.op == "get_attr" else None
    return value if value is not None and value.is_floating_point() else None


def _step(gm: GraphModule, node: Node) -> tuple[float, Tensor, bool] | None:
    """The scales of a site's operands, if both are integers with constant qparams."""
    activation, weight = argument(node, "input"), argument(node, "weight")
    if not isinstance(activation, Node) or not isinstance(weight, Node):
        return None
    if not is_dequantize(activation) or not is_dequantize(weight):
        return None
    if kind_of_qdq(activation) is not QdqKind.PER_TENSOR:
        return None  # no one step for each output
    scale = activation.args[1]
    kind = kind_of_qdq(weight)
    if kind is QdqKind.PER_CHANNEL:
        held = weight.args[1]
        value = constant_of(gm, held) if isinstance(held, Node) else None
        found = None if value is None else value.to(torch.float32)
    else:
        found = read_qparams(gm, weight).scale if kind is QdqKind.PER_TENSOR else None
    if found is None or not isinstance(scale, float):
        return None
    return scale, found, kind is QdqKind.PER_CHANNEL


def _rounded(sites: Sequence[_Site]) -> list[Tensor | None]:
    """Each bias on its steps, those with a step for each output in one computation."""
    found: dict[int, Tensor] = {}
    along = [i for i, site in enumerate(sites) if _is_vector(site)]
    if along:
        joined = [sites[i] for i in along]
        lengths = [site.value.numel() for site in joined]
        scales = torch.tensor([site.activation_scale for site in joined])
        scales = scales.repeat_interleave(torch.tensor(lengths))
        steps = _steps(torch.cat([site.weight_scale for site in joined]) * scales, axis=0)
        values = torch.cat([site.value.to(torch.float32) for site in joined])
        made = fake_quantize(values, steps).split_with_sizes(lengths)
        # Clones: each becomes a constant of its own.
        found = {i: m.to(sites[i].value.dtype).clone() for i, m in zip(along, made, strict=True)}
    for i, site in enumerate(sites):
        if i not in found and site.weight_scale.numel() in (1, site.value.numel()):
            # A tensor of no axis, which may meet one on another device.
            scale = site.weight_scale.reshape(-1) * torch.tensor(site.activation_scale)
            found[i] = fake_quantize(site.value, _steps(scale, 0 if site.is_along else None))
    fits = (i for i, site in enumerate(sites) if i in found and _fits(site))
    kept = {i: found[i] for i in fits}
    return [kept.get(i) for i in range(len(sites))]


def _fits(site: _Site) -> bool:
    """True if int32 holds a bias; behind inputs that are all 0 it does not, and is left alone."""
    scale = site.weight_scale.to(site.value.device).double() * site.activation_scale
    return bool((site.value.detach().double().abs() < BIAS_BELOW * scale.reshape(-1)).all())


def _is_vector(site: _Site) -> bool:
    on_cpu = site.value.device.type == site.weight_scale.device.type == "cpu"
    is_plain = site.value.dim() == 1 and site.is_along
    return on_cpu and is_plain and site.weight_scale.shape == site.value.shape


def _steps(scale: Tensor, axis: int | None) -> QParams:
    """The int32 qparams of biases on these steps, with zero_point 0."""
    limits = info(torch.int32)
    return QParams(
        scale=scale,
        zero_point=torch.zeros_like(scale, dtype=torch.int32),
        quant_min=limits.quant_min,
        quant_max=limits.quant_max,
        dtype=torch.int32,
        axis=axis,
    )
