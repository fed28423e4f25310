"""The definition of embedding_gather: rows looked up, then dequantized in float32."""

from typing import Any

import torch
from torch import Tensor

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.packing import unpack
from pt2e_quant.kernels.epilogue.epilogue import Epilogue
from pt2e_quant.kernels.epilogue.reference import finish

__all__ = ["check_bits", "embedding_gather"]

_NIBBLES = {True: getattr(torch, "int4"), False: getattr(torch, "uint4")}  # noqa: B009  # torch's stubs list neither


def check_bits(bits: int) -> None:
    """Refuse widths that the operator has not.

    Raises:
        ConfigError: it is neither 8 nor 4.
    """
    if bits not in (4, 8):
        raise ConfigError(f"embedding_gather takes tables of 8 or 4 bits, found {bits}")


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
        IndexError: an index is outside the table.
    """
    check_bits(bits)
    flat = indices.reshape(-1)
    if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < len(table):
        raise IndexError(f"an index is outside of a table of {len(table)} rows")
    codes = table[flat]
    if bits == 4:
        codes = unpack(codes, _NIBBLES[is_signed], (len(flat), columns))
    steps = codes.to(torch.int32)
    groups = columns // scale.shape[1]
    if zero_point is not None:
        steps = steps - zero_point[flat].repeat_interleave(groups, 1)
    real = steps.float() * scale[flat].float().repeat_interleave(groups, 1)
    return finish(real, Epilogue(**output)).reshape(*indices.shape, columns)
