"""The forms of a quantized convolution or linear that the delegate has a kernel for."""

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.backends.target.requantize_between import sole_quantize
from pt2e_quant.core.qdq import (
    DequantizePerChannel,
    DequantizePerGroup,
    DequantizePerTensor,
    QdqKind,
    QuantizePerTensor,
    is_dequantize,
    kind_of_qdq,
)
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.ops import (
    ADDMM,
    CONV1D,
    CONV2D,
    CONV_TRANSPOSE1D,
    CONV_TRANSPOSE2D,
    HARDTANH,
    LINEAR,
    RELU,
    Overloads,
    argument,
    is_call,
)

GEMMS: Overloads = (*CONV1D, *CONV2D, *CONV_TRANSPOSE1D, *CONV_TRANSPOSE2D, *LINEAR, *ADDMM)
"""Operators whose weight the delegate takes as integers."""

_TRANSPOSED: Overloads = (*CONV_TRANSPOSE1D, *CONV_TRANSPOSE2D)
_INT4 = (-8, 7)
_GROUP_STEP = 32


def operands(node: Node) -> tuple[Any, Any]:
    """(activation, weight) of one of the GEMMS."""
    names = ("mat1", "mat2") if is_call(node, ADDMM) else ("input", "weight")
    return argument(node, names[0]), argument(node, names[1])


def is_static_int8(node: Node) -> bool:
    """True if a node is a static per-tensor q or dq of int8."""
    return node.target in (DequantizePerTensor, QuantizePerTensor) and node.args[5] is torch.int8


def is_int4(dequantize: Node) -> bool:
    """True if a dq of groups or channels reads integers of 4 bits, which the delegate packs."""
    if dequantize.target not in (DequantizePerGroup, DequantizePerChannel):
        return False
    first = 3 if dequantize.target is DequantizePerGroup else 4
    return dequantize.args[first : first + 3] == (*_INT4, torch.int8)


def is_weight_only(node: Node) -> bool:
    """True if a node is a linear of float activations and a dequantized weight."""
    if not is_call(node, LINEAR):
        return False
    activation, weight = operands(node)
    return isinstance(weight, Node) and is_dequantize(weight) and not is_dequantize(activation)


def why_no_kernel(gm: GraphModule, node: Node) -> str | None:
    """Why the delegate cannot run one of the GEMMS with a dequantized weight; None if it can.

    Args:
        gm: the graph's module, which holds the weights' qparams.
        node: the convolution or linear.
    """
    activation, weight = operands(node)
    kind = kind_of_qdq(activation) if isinstance(activation, Node) else None
    if kind is QdqKind.PER_TOKEN and is_call(node, LINEAR):
        return _why_no_rows(gm, weight, groups=True)
    if kind is QdqKind.PER_TENSOR_DYNAMIC and is_call(node, CONV2D):
        return _why_no_dynamic_conv(gm, node, weight)
    if is_weight_only(node):
        return _why_no_rows(gm, weight, groups=False)
    if not isinstance(activation, Node) or not is_static_int8(activation):
        return "its input is not static int8"
    if not gives_static_int8(node):
        return "its output is not static int8"
    if weight.target is DequantizePerGroup or weight.args[-1] is not torch.int8:
        return "its weight is not int8 per channel"
    return None if _axis_fits(weight, node) else "its scales are not one per output channel"


def _why_no_rows(gm: GraphModule, weight: Node, *, groups: bool) -> str | None:
    """Why a linear that gives float has no kernel: it takes int8 or int4 rows, and int4 groups."""
    if not _is_symmetric(gm, weight):
        return "the zero_points of its weight are not 0"
    columns = weight.meta["val"].shape[-1]
    if weight.target is DequantizePerGroup:
        if not groups:
            return "XNNPACK has no weight-only linear with groups"
        if not is_int4(weight) or int(weight.args[6]) % _GROUP_STEP:  # type: ignore[arg-type]  # an int by schema
            return f"groups are of int4 and a multiple of {_GROUP_STEP} columns"
        return None
    if weight.target is not DequantizePerChannel or weight.args[3] != 0:
        return "its scales are not one per output channel"
    if weight.args[-1] is not torch.int8:
        return "its weight is not int8 or int4"
    if is_int4(weight) and columns % 2:
        return "an int4 weight needs an even number of columns"
    return None


def _why_no_dynamic_conv(gm: GraphModule, node: Node, weight: Node) -> str | None:
    if weight.target is not DequantizePerChannel or not _is_symmetric(gm, weight):
        return "its weight is not symmetric int8 per channel"
    if weight.args[-1] is not torch.int8 or not _axis_fits(weight, node):
        return "its scales are not one per output channel"
    if argument(node, "groups") != 1 and weight.meta["val"].shape[1] == 1:
        return "XNNPACK has no depthwise convolution of dynamic activations"
    return None


def _is_symmetric(gm: GraphModule, weight: Node) -> bool:
    zero_point = weight.args[2]
    value = constant_of(gm, zero_point) if isinstance(zero_point, Node) else zero_point
    return not value.any() if isinstance(value, Tensor) else value in (0, None)


def gives_static_int8(node: Node) -> bool:
    """True if all that reads a node, or the clip behind it, is one static int8 quantize."""
    users = list(node.users)
    if len(users) == 1 and is_call(users[0], (*RELU, *HARDTANH)):
        node = users[0]
    quantize = sole_quantize(node)
    return quantize is not None and is_static_int8(quantize)


def _axis_fits(dequantize: Node, user: Node) -> bool:
    if dequantize.target is DequantizePerTensor:
        return bool(dequantize.args[2] == 0)
    axis = dequantize.args[3]
    if is_call(user, _TRANSPOSED):
        return bool(axis == 1 and argument(user, "groups") == 1)
    return bool(axis == (1 if is_call(user, ADDMM) else 0))
