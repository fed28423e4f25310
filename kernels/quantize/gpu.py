"""quantize in Triton: elements in the order in which they lie in memory."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pt2e_quant.core.errors import InputError
from pt2e_quant.kernels.epilogue.epilogue import INTEGER_OUTPUTS, Epilogue
from pt2e_quant.kernels.epilogue.gpu import (
    activate,
    output_launch_arguments,
    real_values,
    requantize,
    stored,
)
from pt2e_quant.kernels.launch import ELEMENTS, check_fp8, check_operands, launching
from pt2e_quant.kernels.quantize.reference import PIXEL
from pt2e_quant.kernels.tiles import TileConfig, elements_class, tiles_for

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit(do_not_specialize=["x_zero_point", "out_zero_point", "out_min", "out_max"])
def quantize_kernel(
    x, out, size, x_scale, x_zero_point, act_low, act_high, out_scaling, out_zero_point, out_min,
    out_max,
    FROM_INTEGER: tl.constexpr, ACTIVATION: tl.constexpr, IS_INTEGER: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK elements of x, wherever they stand in its shape."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    real = real_values(tl.load(x + at, mask=inside, other=0), x_scale, x_zero_point, FROM_INTEGER)
    real = activate(real, act_low, act_high, ACTIVATION)
    made = stored(real, out, out_scaling, out_zero_point, out_min, out_max, IS_INTEGER)
    tl.store(out + at, made, mask=inside)


@triton.jit(do_not_specialize=["out_zero_point", "out_min", "out_max"])
def quantize_pixels_kernel(
    x, out, area, out_scaling, out_zero_point, out_min, out_max,
    CHANNELS: tl.constexpr, IS_PLANAR: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK pixels of one image of `area` pixels: a word of four bytes each.

    A planar image has its channels one after the other, any other has the pixels so.
    """
    tiles = tl.cdiv(area, BLOCK)
    image = (tl.program_id(0) // tiles).to(tl.int64)
    pixels = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    inside = pixels < area
    first = x + image * area * CHANNELS
    word = tl.zeros((BLOCK,), dtype=tl.int32)
    for channel in tl.static_range(WIDTH):
        if channel < CHANNELS:
            at = channel * area + pixels if IS_PLANAR else pixels * CHANNELS + channel
            real = tl.load(first + at, mask=inside, other=0.0).to(tl.float32)
            steps = requantize(real, out_scaling, out_zero_point, out_min, out_max)
        else:
            steps = tl.zeros((BLOCK,), dtype=tl.int32) + out_zero_point
        word |= (steps & 0xFF) << (8 * channel)
    tl.store(out + image * area + pixels, word, mask=inside)


def quantize(
    x: Tensor,
    *,
    x_scale: float = 1.0,
    x_zero_point: int = 0,
    label: str = "",
    tiles: TileConfig | None = None,
    **output: Any,
) -> Tensor:
    """Launch the kernel; see `op.Quantize` for the arguments, `tiles` replaces the tables'.

    What is not dense in memory is copied first.

    Raises:
        InputError: a dtype that the kernel does not take.
        UnsupportedError: the GPU is too old.
    """
    end = Epilogue(**output)
    check_operands("quantize", {"x": (x, ELEMENTS)})
    if end.out_dtype is torch.float8_e4m3fn:
        check_fp8("quantize", x.device)
    out = torch.empty_like(x, dtype=end.out_dtype)
    if out.numel() == 0:
        return out
    if x.stride() != out.stride():
        x = torch.empty_like(x).copy_(x)
    chosen = tiles or tiles_for("quantize", x.device, elements_class(x.numel()))
    with launching("quantize", label, x.device):
        quantize_kernel[(triton.cdiv(x.numel(), chosen["BLOCK"]),)](
            x=x,
            out=out,
            size=x.numel(),
            x_scale=x_scale,
            x_zero_point=x_zero_point,
            FROM_INTEGER=x.dtype in INTEGER_OUTPUTS,
            **output_launch_arguments(end),
            # A fused multiply-add would skip a rounding that the definition has.
            enable_fp_fusion=False,
            **chosen.options(),
        )
    return out


def quantize_pixels(
    x: Tensor,
    *,
    out_scale: float = 1.0,
    out_zero_point: int = 0,
    out_min: int = -128,
    out_max: int = 127,
    label: str = "",
    tiles: TileConfig | None = None,
) -> Tensor:
    """Launch the kernel; see `op.QuantizePixels` for the arguments, `tiles` replaces the tables'.

    What is neither contiguous nor channels-last is copied first.

    Raises:
        InputError: a dtype or a shape that the kernel does not take.
        UnsupportedError: the GPU is too old.
    """
    end = Epilogue(
        out_dtype=torch.int8,
        out_scale=out_scale,
        out_zero_point=out_zero_point,
        out_min=out_min,
        out_max=out_max,
    )
    check_operands("quantize_pixels", {"x": (x, _FLOATS)})
    if x.dim() != 4 or not 1 <= x.shape[1] <= PIXEL or x[:1].numel() >= 2**31 // PIXEL:
        raise InputError(
            f"quantize_pixels takes x as [N, 1 .. {PIXEL}, H, W] of images below 2 GiB, "
            f"found {list(x.shape)}"
        )
    N, C, H, W = x.shape
    out = torch.empty((N, H, W), dtype=torch.int32, device=x.device)
    made = out.view(torch.int8).reshape(N, H, W, PIXEL).permute(0, 3, 1, 2)
    if out.numel() == 0:
        return made
    is_planar = not x.is_contiguous(memory_format=torch.channels_last)
    chosen = tiles or tiles_for("quantize", x.device, elements_class(PIXEL * out.numel()))
    with launching("quantize_pixels", label, x.device):
        quantize_pixels_kernel[(N * triton.cdiv(H * W, chosen["BLOCK"]),)](
            x=x.contiguous() if is_planar else x,
            out=out,
            area=H * W,
            out_scaling=end.scaling,
            out_zero_point=out_zero_point,
            out_min=out_min,
            out_max=out_max,
            CHANNELS=C,
            IS_PLANAR=is_planar,
            WIDTH=PIXEL,
            # A fused multiply-add would skip a rounding that the definition has.
            enable_fp_fusion=False,
            **chosen.options(),
        )
    return made
