"""The definition of embedding_gather: rows looked up, then dequantized in float32."""

from typing import Any

import torch
from torch import Tensor

from pt2e_quant.core.errors import ConfigError, InputError
from pt2e_quant.core.packing import unpack
from pt2e_quant.kernels.epilogue.epilogue import Epilogue
from pt2e_quant.kernels.epilogue.reference import finish

_FOUR_BITS = {True: getattr(torch, "int4"), False: getattr(torch, "uint4")}  # noqa: B009  # torch's stubs list neither


def check_bits(bits: int) -> None:
    """Refuse widths that the operator has not.

    Raises:
        ConfigError: it is neither 8 nor 4.
    """
    if bits not in (4, 8):
        raise ConfigError(f"embedding_gather takes tables of 8 or 4 bits, found {bits}")


def check_table(
    table: Tensor, scale: Tensor, zero_point: Tensor | None, columns: int, bits: int
) -> None:
    """Refuse qparams and rows that are not the table's.

    Raises:
        InputError: a shape is another.
    """
    row = -(-columns * bits // 8)
    if table.dim() != 2 or table.shape[1] != row:
        raise InputError(
            f"embedding_gather takes {columns} columns of {bits} bits in rows of {row} bytes, "
            f"found {tuple(table.shape)}"
        )
    groups = scale.shape[1] if scale.dim() == 2 and len(scale) == len(table) else 0
    if groups == 0 or columns % groups:
        raise InputError(
            f"embedding_gather takes a scale for each group of a row of {columns}, for "
            f"{len(table)} rows, found {tuple(scale.shape)}"
        )
    if zero_point is not None and zero_point.shape != scale.shape:
        raise InputError(
            f"embedding_gather takes as many zero points as scales, {tuple(scale.shape)}, found "
            f"{tuple(zero_point.shape)}"
        )


def embedding_gather(
    table: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    indices: Tensor,
    columns: int,
    bits: int = 8,
    is_signed: bool = True,
    *,
    label: str = "",
    **output: Any,
) -> Tensor:
    """Look rows up; see `op.EmbeddingGather` for the arguments.

    Raises:
        InputError: the qparams or the rows are not the table's.
        IndexError: an index is outside the table.
    """
    check_bits(bits)
    check_table(table, scale, zero_point, columns, bits)
    flat = indices.reshape(-1)
    if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < len(table):
        raise IndexError(f"an index is outside of a table of {len(table)} rows")
    codes = table[flat]
    if bits == 4:
        codes = unpack(codes, _FOUR_BITS[is_signed], (len(flat), columns))
    steps = codes.to(torch.int32)
    groups = columns // scale.shape[1]
    if zero_point is not None:
        steps = steps - zero_point[flat].repeat_interleave(groups, 1)
    real = steps.float() * scale[flat].float().repeat_interleave(groups, 1)
    return finish(real, Epilogue(**output)).reshape(*indices.shape, columns)
