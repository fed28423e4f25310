"""int8_cat in Triton: rows of the result, of which each tensor fills some columns."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pt2e_quant.kernels.epilogue.epilogue import INTEGER_OUTPUTS, Epilogue
from pt2e_quant.kernels.epilogue.gpu import (
    activate,
    output_launch_arguments,
    real_values,
    stored,
)
from pt2e_quant.kernels.int8_cat.reference import check_counts, empty_result
from pt2e_quant.kernels.launch import ELEMENTS, check_operands, launching
from pt2e_quant.kernels.tiles import TileConfig, columns_class, tiles_for

AT_ONCE = 4
"""Tensors of one launch."""


@triton.jit
def _part(x, rows, columns, in_rows, first, width, scale, zero_point, IS_INTEGER: tl.constexpr):
    """A tensor's values at columns of the result, and where it has them."""
    inside = in_rows[:, None] & ((columns >= first) & (columns < first + width))[None, :]
    place = rows[:, None] * width + (columns - first)[None, :]
    loaded = tl.load(x + place, mask=inside, other=0)
    return real_values(loaded, scale, zero_point, IS_INTEGER), inside


@triton.jit(do_not_specialize=["zero_0", "zero_1", "zero_2", "zero_3", "out_zero_point"])
def int8_cat_kernel(
    x_0, x_1, x_2, x_3, out, M, total, first, end, width_0, width_1, width_2, width_3, scale_0,
    scale_1, scale_2, scale_3, zero_0, zero_1, zero_2, zero_3, act_low, act_high, out_scaling,
    out_zero_point, out_min, out_max,
    COUNT: tl.constexpr, FROM_INTEGER: tl.constexpr, ACTIVATION: tl.constexpr,
    IS_INTEGER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of columns first .. end of rows of `total`; COUNT tensors lie side by side in them."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    in_rows = rows < M
    real, inside = _part(x_0, rows, columns, in_rows, 0, width_0, scale_0, zero_0, FROM_INTEGER)
    at = width_0
    if COUNT > 1:
        next_one, inside = _part(
            x_1, rows, columns, in_rows, at, width_1, scale_1, zero_1, FROM_INTEGER
        )
        real = tl.where(inside, next_one, real)
        at += width_1
    if COUNT > 2:
        next_one, inside = _part(
            x_2, rows, columns, in_rows, at, width_2, scale_2, zero_2, FROM_INTEGER
        )
        real = tl.where(inside, next_one, real)
        at += width_2
    if COUNT > 3:
        next_one, inside = _part(
            x_3, rows, columns, in_rows, at, width_3, scale_3, zero_3, FROM_INTEGER
        )
        real = tl.where(inside, next_one, real)
    real = activate(real, act_low, act_high, ACTIVATION)
    made = stored(real, out, out_scaling, out_zero_point, out_min, out_max, IS_INTEGER)
    place = rows[:, None] * total + (first + columns)[None, :]
    is_ours = in_rows[:, None] & (columns < end - first)[None, :]
    tl.store(out + place, made, mask=is_ours)


def int8_cat(
    xs: Sequence[Tensor],
    dim: int,
    scales: Sequence[float],
    zero_points: Sequence[int],
    *,
    label: str = "",
    tiles: TileConfig | None = None,
    **output: Any,
) -> Tensor:
    """Launch the kernel; see `op.Int8Cat` for the arguments, `tiles` replaces the tables'.

    Raises:
        ConfigError: qparams that are not one a tensor.
        InputError: dtypes that the kernel does not take, or two of them.
        UnsupportedError: the GPU is too old.
    """
    check_counts(xs, scales, zero_points)
    end = Epilogue(**output)
    # One dtype: what a launch reads is compiled into it.
    first_kind = (xs[0].dtype,) if xs[0].dtype in ELEMENTS else ELEMENTS
    check_operands("int8_cat", {f"xs[{i}]": (x, first_kind) for i, x in enumerate(xs)})
    out = empty_result(xs, dim, end.out_dtype)
    if out.numel() == 0:
        return out
    rows, inner, parts = _as_rows(out, xs, dim % out.dim())
    total = out.shape[dim] * inner
    first = 0
    for at in range(0, len(parts), AT_ONCE):
        group = slice(at, at + AT_ONCE)
        widths = [x.shape[dim] * inner for x in xs[group]]
        span = (first, first + sum(widths))
        _launch(
            parts[group],
            widths,
            scales[group],
            zero_points[group],
            out,
            rows,
            total,
            span,
            end,
            label,
            tiles,
        )
        first = span[1]
    return out


def _as_rows(out: Tensor, xs: Sequence[Tensor], dim: int) -> tuple[int, int, list[Tensor]]:
    """Rows of the result, elements behind the axis, and the tensors laid out as the result is."""
    is_image = out.dim() == 4 and not out.is_contiguous()
    layout = torch.channels_last if is_image else torch.contiguous_format
    order = (0, 2, 3, 1) if is_image else tuple(range(out.dim()))
    sizes = [out.shape[i] for i in order]
    place = order.index(dim)
    rows = inner = 1
    for size in sizes[:place]:
        rows *= size
    for size in sizes[place + 1 :]:
        inner *= size
    return rows, inner, [x.contiguous(memory_format=layout) for x in xs]


def _launch(
    xs: Sequence[Tensor],
    widths: Sequence[int],
    scales: Sequence[float],
    zero_points: Sequence[int],
    out: Tensor,
    rows: int,
    total: int,
    span: tuple[int, int],
    end: Epilogue,
    label: str,
    tiles: TileConfig | None,
) -> None:
    """Fill columns span[0] .. span[1] of the result's rows."""
    chosen = tiles or tiles_for("int8_cat", out.device, columns_class(span[1] - span[0]))
    missing = AT_ONCE - len(xs)
    held: dict[str, Any] = {}
    for name, values, filler in (
        ("x", xs, xs[0]),
        ("width", widths, 0),
        ("scale", scales, 1.0),
        ("zero", zero_points, 0),
    ):
        padded = (*values, *(filler,) * missing)
        held |= {f"{name}_{i}": value for i, value in enumerate(padded)}
    grid = (
        triton.cdiv(rows, chosen["BLOCK_M"]),
        triton.cdiv(span[1] - span[0], chosen["BLOCK_K"]),
    )
    with launching("int8_cat", label, out.device):
        int8_cat_kernel[grid](
            **held,
            out=out,
            M=rows,
            total=total,
            first=span[0],
            end=span[1],
            **output_launch_arguments(end),
            COUNT=len(xs),
            FROM_INTEGER=xs[0].dtype in INTEGER_OUTPUTS,
            # A fused multiply-add would skip a rounding that the definition has.
            enable_fp_fusion=False,
            **chosen.options(),
        )
