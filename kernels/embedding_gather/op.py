"""The operator `pt2e_quant::embedding_gather`."""

from typing import Any

import torch
from torch import Tensor

from pt2e_quant.kernels.cost import Cost, moved_bytes
from pt2e_quant.kernels.embedding_gather import reference
from pt2e_quant.kernels.epilogue.epilogue import OUTPUT_SCHEMA
from pt2e_quant.kernels.fused_op import define, triton_kernel

__all__ = ["EmbeddingGather", "cost"]


def _fake(
    table: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    indices: Tensor,
    columns: int,
    bits: int = 8,
    is_signed: bool = True,
    *,
    out_dtype: torch.dtype = torch.float32,
    **named: Any,
) -> Tensor:
    return scale.new_empty((*indices.shape, columns), dtype=out_dtype)


EmbeddingGather = define(
    "embedding_gather(Tensor table, Tensor scale, Tensor? zero_point, Tensor indices, "
    f"int columns, int bits=8, bool is_signed=True, *, {OUTPUT_SCHEMA}, "
    'str label="") -> Tensor',
    reference=reference.embedding_gather,
    triton=triton_kernel("pt2e_quant.kernels.embedding_gather.gpu", "embedding_gather"),
    fake=_fake,
)
"""y[..., k] = (table[index, k] - zero_point) * scale, of the index's row and k's group.

    table: int8 or uint8[V, K]; for 4 bits uint8[V, ceil(K / 2)] in the format of `core.packing`.
    scale: a float dtype[V, K / G]; zero_point: int32[V, K / G], None where all are 0.
    indices: int64 or int32 of any shape.
    columns: K.
    is_signed: whether 4-bit codes are two's complement.
    out_dtype: a float dtype, or int8 or uint8 with the qparams out_scale and so on.
    label: the node, for the profiler.

An index outside of the table is an IndexError on the CPU, and on a GPU a row of NaN, or of
zeros where the result is integers.
"""


def cost(table: Tensor, scale: Tensor, indices: Tensor, out: Tensor) -> Cost:
    """Bytes and operations of one call: of the table only the rows that are looked up."""
    row = table.shape[1] * table.element_size() + scale.shape[1] * scale.element_size()
    return Cost(bytes=moved_bytes(indices, out) + indices.numel() * row, operations=2 * out.numel())
