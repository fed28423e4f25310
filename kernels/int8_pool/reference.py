"""The definition of int8_pool: exact integer sums, or maxima; then float32 steps.

The q/dq graph adds floats that are rounded one by one: an average beside a tie may differ by a
step. A maximum does not.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pt2e_quant.kernels.epilogue.epilogue import Epilogue
from pt2e_quant.kernels.epilogue.reference import finish
from pt2e_quant.kernels.int8_pool.windows import PoolKind, Span, check_kind, spans


def like_images(x: Tensor, out_size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An empty result, channels-last."""
    N, C = x.shape[:2]
    return torch.empty(
        (N, C, *out_size), dtype=dtype, device=x.device, memory_format=torch.channels_last
    )


def int8_pool(
    x: Tensor,
    kind: str,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    out_size: Sequence[int],
    counts_padding: bool = True,
    divisor: int = 0,
    *,
    x_scale: float = 1.0,
    x_zero_point: int = 0,
    label: str = "",
    **output: Any,
) -> Tensor:
    """Pool images; see `op.Int8Pool` for the arguments."""
    chosen, end = check_kind(kind), Epilogue(**output)
    rows, columns = (
        spans(chosen, x.shape[2 + i], out_size[i], kernel[i], stride[i], padding[i])
        for i in range(2)
    )
    steps = x.to(torch.int32) - x_zero_point
    if chosen is PoolKind.MAX:
        best = _along(_along(steps, 2, rows, torch.amax), 3, columns, torch.amax)
        real = best.float() * x_scale
    else:
        total = _along(_along(steps, 2, rows, torch.sum), 3, columns, torch.sum)
        counts = _counts(rows, columns, counts_padding=counts_padding, divisor=divisor)
        real = total.float() * x_scale / counts.to(x.device)
    return like_images(x, out_size, end.out_dtype).copy_(finish(real, end))


def _along(x: Tensor, axis: int, windows: Sequence[Span], reduce: Any) -> Tensor:
    """One axis reduced window by window."""
    parts = [reduce(x.narrow(axis, s.start, s.end - s.start), dim=axis) for s in windows]
    return torch.stack(parts, axis)


def _counts(
    rows: Sequence[Span], columns: Sequence[Span], *, counts_padding: bool, divisor: int
) -> Tensor:
    """The divisor of every window's sum: float32[H, W]."""

    def lengths(windows: Sequence[Span]) -> Tensor:
        return torch.tensor([s.padded if counts_padding else s.end - s.start for s in windows])

    counts = lengths(rows)[:, None] * lengths(columns)
    return (torch.full_like(counts, divisor) if divisor else counts).float()
