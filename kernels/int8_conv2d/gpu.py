"""int8_conv2d in Triton: an implicit product over channels-last pixels.

Places outside of the image are read as 0, which copies to shared memory do for nothing; the zero
point is taken off by what the taps inside the image sum to (`pack.window_sums`).
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pt2e_quant.core.errors import InputError
from pt2e_quant.kernels.conv_taps.gpu import (
    multiply_rows_of_taps,
    multiply_taps,
    take_off_zero_point,
)
from pt2e_quant.kernels.epilogue.epilogue import Epilogue
from pt2e_quant.kernels.epilogue.gpu import launch_arguments, write_result
from pt2e_quant.kernels.int8_conv2d.window import ConvSizes, conv_sizes
from pt2e_quant.kernels.launch import check_product, check_shapes, launching
from pt2e_quant.kernels.tiles import TileConfig, tiles_for


@triton.jit(
    do_not_specialize=["depth_units", "residual_zero_point", "out_zero_point", "out_min", "out_max"]
)
def int8_conv2d_kernel(
    x,
    x_scale,
    x_zero_point,
    weight,
    weight_scale,
    weight_sums,
    bias,
    residual,
    out,
    M,
    H,
    W,
    OH,
    OW,
    outputs,
    groups,
    depth_units,
    stride_h,
    stride_w,
    padding_h,
    padding_w,
    dilation_h,
    dilation_w,
    residual_scale,
    residual_zero_point,
    act_low,
    act_high,
    out_scaling,
    out_zero_point,
    out_min,
    out_max,
    HAS_BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_INTEGER: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    IS_FOLDED: tl.constexpr,
    IS_PADDED: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of BLOCK_M pixels (of N * OH * OW = M) and BLOCK_N output channels of one group.

    The arguments are those of `op.Int8Conv2d`. A group has depth_units * UNIT input channels,
    where UNIT is a power of two: loads are as wide as that says. Folded, UNIT is all of them.
    """
    columns_of_group = outputs // groups
    tiles_n = tl.cdiv(columns_of_group, BLOCK_N)
    # Programs that read the same pixels run side by side.
    tile_m = tl.program_id(0) // (tiles_n * groups)
    tile = tl.program_id(0) % (tiles_n * groups)
    group = tile // tiles_n
    within = (tile % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_columns = within < columns_of_group
    columns = group * columns_of_group + within
    depth_of_group = depth_units * UNIT
    C = depth_of_group * groups
    pixels = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    in_pixels = pixels < M
    image, pixel = pixels // (OH * OW), pixels % (OH * OW)
    h0 = (pixel // OW) * stride_h - padding_h
    w0 = (pixel % OW) * stride_w - padding_w
    # A batch of images may pass 2**31, one image may not. A window that begins outside of its
    # image has an address there too, which is masked.
    x_at = x + image.to(tl.int64) * H * W * C + (h0 * W + w0) * C + group * depth_of_group
    weight_at = weight + columns.to(tl.int64) * (KH * KW * depth_of_group)
    h0 = tl.where(in_pixels, h0, -(1 << 30))
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    if IS_FOLDED:
        # depth_units is 1, but only at run time: else the compiler would unroll the whole loop.
        total = multiply_rows_of_taps(
            total, x_at, weight_at, h0, w0, in_pixels, in_columns,
            H, W, C, KH * depth_units, dilation_h, dilation_w, IS_PADDED, KW, UNIT, BLOCK_K,
        )  # fmt: skip
    else:
        total = multiply_taps(
            total, x_at, weight_at, h0, w0, in_pixels, in_columns,
            H, W, C, depth_of_group, dilation_h, dilation_w, IS_PADDED, KH, KW, BLOCK_K,
        )  # fmt: skip

    inside = in_pixels[:, None] & in_columns[None, :]
    zero_point = tl.load(x_zero_point)
    if IS_PADDED:
        total = take_off_zero_point(
            total, zero_point, weight_sums, h0, w0, columns, outputs,
            H, W, dilation_h, dilation_w, inside, KH, KW,
        )  # fmt: skip
    else:
        last = weight_sums + (KH * (KW + 1) + KW) * outputs
        total -= zero_point * tl.load(last + columns, mask=in_columns, other=0)[None, :]
    channel_scale = tl.load(weight_scale + columns, mask=in_columns, other=0.0)
    real = total.to(tl.float32) * (tl.load(x_scale) * channel_scale[None, :])
    if HAS_BIAS:
        real += tl.load(bias + columns, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    place = pixels.to(tl.int64)[:, None] * outputs + columns[None, :]
    write_result(
        real, place, inside, residual, out, residual_scale, residual_zero_point,
        act_low, act_high, out_scaling, out_zero_point, out_min, out_max,
        RESIDUAL, ACTIVATION, IS_INTEGER,
    )  # fmt: skip


@triton.jit(do_not_specialize=["residual_zero_point", "out_zero_point", "out_min", "out_max"])
def depthwise_kernel(
    x, x_scale, x_zero_point, weight, weight_scale, weight_sums, bias, residual, out, M, H, W,
    OH, OW, outputs, stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w,
    residual_scale, residual_zero_point, act_low, act_high, out_scaling, out_zero_point, out_min,
    out_max,
    HAS_BIAS: tl.constexpr, RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
    IS_INTEGER: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, MULTIPLIER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A tile of BLOCK_M pixels and BLOCK_N channels, one tap after the other.

    MULTIPLIER output channels read each input channel. Here padding is read as the zero point.
    """
    tiles_n = tl.cdiv(outputs, BLOCK_N)
    columns = (tl.program_id(0) % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    pixels = (tl.program_id(0) // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_columns, in_pixels = columns < outputs, pixels < M
    C = outputs // MULTIPLIER
    image, pixel = pixels // (OH * OW), pixels % (OH * OW)
    h0 = (pixel // OW) * stride_h - padding_h
    w0 = (pixel % OW) * stride_w - padding_w
    x_at = x + image.to(tl.int64) * H * W * C + (h0 * W + w0) * C
    x_at = x_at[:, None] + (columns // MULTIPLIER)[None, :]
    zero_point = tl.load(x_zero_point)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    for tap_h in tl.static_range(KH):
        for tap_w in tl.static_range(KW):
            h, w = h0 + tap_h * dilation_h, w0 + tap_w * dilation_w
            in_image = in_pixels & (h >= 0) & (h < H) & (w >= 0) & (w < W)
            left = tl.load(
                x_at + (tap_h * dilation_h * W + tap_w * dilation_w) * C,
                mask=in_image[:, None] & in_columns[None, :],
                other=0,
            ).to(tl.int32)
            # Between the load and the product: `other` of a load must be of the image's dtype.
            left = tl.where(in_image[:, None], left, zero_point)
            right = tl.load(
                weight + (tap_h * KW + tap_w) * outputs + columns, mask=in_columns, other=0
            )
            total += left * right.to(tl.int32)[None, :]

    last = weight_sums + (KH * (KW + 1) + KW) * outputs
    total -= zero_point * tl.load(last + columns, mask=in_columns, other=0)[None, :]
    channel_scale = tl.load(weight_scale + columns, mask=in_columns, other=0.0)
    real = total.to(tl.float32) * (tl.load(x_scale) * channel_scale[None, :])
    if HAS_BIAS:
        real += tl.load(bias + columns, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    inside = in_pixels[:, None] & in_columns[None, :]
    place = pixels.to(tl.int64)[:, None] * outputs + columns[None, :]
    write_result(
        real, place, inside, residual, out, residual_scale, residual_zero_point,
        act_low, act_high, out_scaling, out_zero_point, out_min, out_max,
        RESIDUAL, ACTIVATION, IS_INTEGER,
    )  # fmt: skip


def int8_conv2d(
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_sums: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    *,
    label: str = "",
    tiles: TileConfig | None = None,
    **epilogue: Any,
) -> Tensor:
    """Launch the kernel; see `op.Int8Conv2d` for the arguments, `tiles` replaces the tables'.

    What is not channels-last is copied first.

    Raises:
        InputError: dtypes, devices or sizes that the kernel does not take.
        UnsupportedError: the GPU is too old.
    """
    residual = epilogue.get("residual")
    if residual is not None:
        epilogue["residual"] = residual.permute(0, 2, 3, 1)
    end = Epilogue(**epilogue)
    check_product("int8_conv2d", x, x_scale, x_zero_point, weight, weight_scale, weight_sums)
    if x.dim() == 4 and x[:1].numel() >= 2**31:
        raise InputError(f"int8_conv2d takes images below 2 GiB, found {list(x.shape[1:])}")
    sizes = conv_sizes(x.shape, weight.shape, stride, padding, dilation, groups)
    rows = x.permute(0, 2, 3, 1).contiguous()
    shape = (sizes.batch, *sizes.out, sizes.outputs)
    window = (sizes.kernel[0] + 1, sizes.kernel[1] + 1, sizes.outputs)
    check_shapes(
        "int8_conv2d",
        {
            "x_scale": (x_scale, (1,)),
            "x_zero_point": (x_zero_point, (1,)),
            "weight_scale": (weight_scale, (sizes.outputs,)),
            "weight_sums": (weight_sums, window),
            "bias": (end.bias, (sizes.outputs,)),
            "residual": (end.residual, shape),
        },
    )
    out = torch.empty(shape, dtype=end.out_dtype, device=x.device)
    if out.numel() == 0:
        return out.permute(0, 3, 1, 2)
    named = {
        "x": rows,
        "x_scale": x_scale,
        "x_zero_point": x_zero_point,
        "weight": weight.contiguous(),
        "weight_scale": weight_scale.contiguous(),
        "weight_sums": weight_sums.contiguous(),
        "bias": None if end.bias is None else end.bias.contiguous(),
        "out": out,
        **_geometry(sizes),
        **launch_arguments(end),
    }
    chosen = tiles or tiles_for("int8_conv2d", x.device, sizes.shape_class)
    with launching("int8_conv2d", label, x.device):
        (_launch_depthwise if sizes.is_depthwise else _launch_product)(sizes, chosen, named)
    return out.permute(0, 3, 1, 2)


def _launch_depthwise(sizes: ConvSizes, tiles: TileConfig, named: dict[str, Any]) -> None:
    tiles_m = triton.cdiv(sizes.pixels, tiles["BLOCK_M"])
    programs = tiles_m * triton.cdiv(sizes.outputs, tiles["BLOCK_N"])
    depthwise_kernel[(programs,)](
        **named,
        MULTIPLIER=sizes.columns,
        # A fused multiply-add would skip a rounding that the definition has.
        enable_fp_fusion=False,
        **tiles.options(),
    )


def _launch_product(sizes: ConvSizes, tiles: TileConfig, named: dict[str, Any]) -> None:
    tiles_m = triton.cdiv(sizes.pixels, tiles["BLOCK_M"])
    programs = tiles_m * sizes.groups * triton.cdiv(sizes.columns, tiles["BLOCK_N"])
    unit = sizes.depth if sizes.is_folded else math.gcd(sizes.depth, 16)
    int8_conv2d_kernel[(programs,)](
        **named,
        groups=sizes.groups,
        depth_units=sizes.depth // unit,
        IS_FOLDED=sizes.is_folded,
        IS_PADDED=any(sizes.padding),
        UNIT=unit,
        enable_fp_fusion=False,
        **tiles.options(),
    )


def _geometry(sizes: ConvSizes) -> dict[str, int]:
    """The sizes that both kernels take."""
    return {
        "M": sizes.pixels,
        "H": sizes.image[0],
        "W": sizes.image[1],
        "OH": sizes.out[0],
        "OW": sizes.out[1],
        "outputs": sizes.outputs,
        "stride_h": sizes.stride[0],
        "stride_w": sizes.stride[1],
        "padding_h": sizes.padding[0],
        "padding_w": sizes.padding[1],
        "dilation_h": sizes.dilation[0],
        "dilation_w": sizes.dilation[1],
        "KH": sizes.kernel[0],
        "KW": sizes.kernel[1],
    }
