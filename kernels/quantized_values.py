"""Reading the q/dq around an operator of a canonical graph."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.core.formats.blocks import WHOLE
from pt2e_quant.core.formats.format_ops import QuantizeFloat
from pt2e_quant.core.formats.number_formats import FP8_E4M3
from pt2e_quant.core.qdq import (
    DequantizePerChannel,
    DequantizePerTensor,
    QuantizePerTensor,
    read_qparams,
)
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.op_table import Constraint


@dataclass(frozen=True, slots=True)
class Affine:
    """Qparams of a whole tensor, as numbers."""

    scale: float
    zero_point: int
    quant_min: int
    quant_max: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class PackedSource:
    """A weight to pack.

    Args:
        integers: int8[N, …].
        scale: float32[N], real units per integer step.
    """

    integers: Tensor
    scale: Tensor


def affine_of(node: object) -> Affine | None:
    """The qparams of a static per-tensor q/dq, None of anything else."""
    if not isinstance(node, Node) or node.target not in (QuantizePerTensor, DequantizePerTensor):
        return None
    scale, zero_point, low, high, dtype = node.args[1:6]
    return Affine(float(scale), int(zero_point), int(low), int(high), dtype)  # type: ignore[arg-type]  # literals by schema


def e4m3_of(node: object) -> Affine | None:
    """The constant scale of a quantize of a whole tensor to float8_e4m3fn, None of anything else.

    The limits and the zero point say nothing there.
    """
    if not isinstance(node, Node) or node.target is not QuantizeFloat:
        return None
    _, scales, tensor_scale, block, name = node.args[:5]
    is_whole = all(length == WHOLE for length in block)  # type: ignore[union-attr]  # literals by schema
    gm = node.graph.owning_module
    if name != FP8_E4M3.name or not is_whole or tensor_scale is not None or gm is None:
        return None
    scale = constant_of(gm, scales) if isinstance(scales, Node) else None
    if scale is None:
        return None
    return Affine(float(scale), 0, -448, 448, torch.float8_e4m3fn)


def requantized(anchor: Node) -> tuple[Affine, list[Node]] | None:
    """The qparams that all readers of a value quantize it to, and those quantizes.

    None where a reader takes it in float, or two differ.
    """
    return _common(anchor, lambda n: affine_of(n) if n.target is QuantizePerTensor else None)


def rewritten(anchor: Node) -> tuple[Affine, list[Node]] | None:
    """As `requantized`, where the readers may also quantize a value to float8_e4m3fn."""
    return requantized(anchor) or _common(anchor, e4m3_of)


def _common(
    anchor: Node, read: Callable[[Node], Affine | None]
) -> tuple[Affine, list[Node]] | None:
    found = {read(user) for user in anchor.users}
    if len(found) != 1:
        return None
    affine = found.pop()
    return None if affine is None else (affine, list(anchor.users))


def read_weight(gm: GraphModule, node: object) -> PackedSource | None:
    """The integers behind a weight's dequantize: int8 per output channel with zero_point 0."""
    if not isinstance(node, Node) or node.target is not DequantizePerChannel:
        return None
    source = node.args[0]
    integers = constant_of(gm, source) if isinstance(source, Node) else None
    qparams = read_qparams(gm, node)
    if integers is None or integers.dtype is not torch.int8 or qparams.axis != 0:
        return None
    if bool(qparams.zero_point.any()):
        return None
    return PackedSource(integers.contiguous(), qparams.scale.float().contiguous())


QUANTIZED_RESULT = Constraint(
    text="a result that all its readers quantize alike",
    holds=lambda match: requantized(match.anchor) is not None,
)
REWRITTEN_RESULT = Constraint(
    text="a result that all its readers quantize alike, to integers or 8-bit floats",
    holds=lambda match: rewritten(match.anchor) is not None,
)
