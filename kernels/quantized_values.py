"""Reading the q/dq around an operator of a canonical graph."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.core.qdq import (
    DequantizePerChannel,
    DequantizePerTensor,
    QuantizePerTensor,
    read_qparams,
)
from pt2e_quant.graph.meta import constant_of

__all__ = ["Affine", "PackedSource", "affine_of", "read_weight", "requantized"]


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


def requantized(anchor: Node) -> tuple[Affine, list[Node]] | None:
    """The qparams that all readers of a value quantize it to, and those quantizes.

    None where a reader takes it in float, or two differ.
    """
    found = {affine_of(u) if u.target is QuantizePerTensor else None for u in anchor.users}
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
