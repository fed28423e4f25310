"""The definition of int8_cat: each dequantized and quantized in float32, as the q/dq graph does."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pt2e_quant.core.errors import ConfigError, InputError
from pt2e_quant.kernels.epilogue.epilogue import Epilogue
from pt2e_quant.kernels.epilogue.reference import finish
from pt2e_quant.kernels.quantize.reference import real_values


def check_counts(xs: Sequence[Tensor], scales: Sequence[float], zero_points: Sequence[int]) -> None:
    """Refuse qparams that are not one a tensor.

    Raises:
        ConfigError: there are more or fewer, or no tensors.
    """
    if not xs or not len(xs) == len(scales) == len(zero_points):
        raise ConfigError(
            f"int8_cat takes a scale and a zero point for each of one tensor or more, found "
            f"{len(xs)} tensors, {len(scales)} scales and {len(zero_points)} zero points"
        )


def empty_result(xs: Sequence[Tensor], dim: int, dtype: torch.dtype) -> Tensor:
    """An empty result, laid out channels-last if the first tensor is.

    Raises:
        InputError: no such axis, or sizes that differ along another.
    """
    first = xs[0]
    if not -first.dim() <= dim < first.dim():
        raise InputError(f"int8_cat has no axis {dim} of {tuple(first.shape)}")
    dim %= first.dim()
    for x in xs[1:]:
        # Symbolic sizes are left to the call: asking would add a guard.
        pairs = [
            (a, b) for i, (a, b) in enumerate(zip(x.shape, first.shape, strict=False)) if i != dim
        ]
        known = [(a, b) for a, b in pairs if type(a) is int and type(b) is int]
        if x.dim() != first.dim() or any(a != b for a, b in known):
            raise InputError(
                f"int8_cat takes tensors that differ along axis {dim} alone, found "
                f"{tuple(first.shape)} and {tuple(x.shape)}"
            )
    shape = [sum(x.shape[i] for x in xs) if i == dim else n for i, n in enumerate(first.shape)]
    is_image = first.dim() == 4 and first.is_contiguous(memory_format=torch.channels_last)
    layout = torch.contiguous_format
    if is_image and not first.is_contiguous():
        layout = torch.channels_last
    return torch.empty(shape, dtype=dtype, device=first.device, memory_format=layout)


def int8_cat(
    xs: Sequence[Tensor],
    dim: int,
    scales: Sequence[float],
    zero_points: Sequence[int],
    *,
    label: str = "",
    **output: Any,
) -> Tensor:
    """Join tensors; see `op.Int8Cat` for the arguments."""
    check_counts(xs, scales, zero_points)
    end = Epilogue(**output)
    parts = zip(xs, scales, zero_points, strict=True)
    made = torch.cat([finish(real_values(*part), end) for part in parts], dim)
    return empty_result(xs, dim, end.out_dtype).copy_(made)
