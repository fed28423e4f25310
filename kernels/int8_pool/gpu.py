"""int8_pool in Triton: a tile of results is some pixels and neighbouring channels."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pt2e_quant.core.errors import InputError
from pt2e_quant.kernels.epilogue.epilogue import INTEGER_OUTPUTS, Epilogue
from pt2e_quant.kernels.epilogue.gpu import activate, output_launch_arguments, stored
from pt2e_quant.kernels.int8_pool.reference import like_images
from pt2e_quant.kernels.int8_pool.windows import PoolKind, check_kind, shape_class, spans
from pt2e_quant.kernels.launch import check_operands, launching
from pt2e_quant.kernels.tiles import TileConfig, tiles_for


@triton.jit
def _span(i, size, out, kernel, stride, padding, IS_ADAPTIVE: tl.constexpr):
    """First element, one behind the last, and the length with padding; see `windows.spans`."""
    if IS_ADAPTIVE:
        start = i * size // out
        end = ((i + 1) * size + out - 1) // out
        return start, end, end - start
    else:
        start = i * stride - padding
        end = tl.minimum(start + kernel, size + padding)
        return tl.maximum(start, 0), tl.minimum(end, size), end - start


@triton.jit(do_not_specialize=["x_zero_point", "out_zero_point", "out_min", "out_max", "divisor"])
def int8_pool_kernel(
    x, out, P, C, H, W, OH, OW, kernel_h, kernel_w, stride_h, stride_w, padding_h, padding_w,
    divisor, x_scale, x_zero_point, act_low, act_high, out_scaling, out_zero_point, out_min,
    out_max,
    KIND: tl.constexpr, COUNTS_PADDING: tl.constexpr, HAS_DIVISOR: tl.constexpr,
    ACTIVATION: tl.constexpr, IS_INTEGER: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """BLOCK_P of P results' pixels, BLOCK_C channels; kernel_h x kernel_w is the widest window."""
    ADAPTIVE: tl.constexpr = KIND == "adaptive"
    pixels = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_pixels, in_channels = pixels < P, channels < C
    row = pixels // OW
    top, bottom, height = _span(row % OH, H, OH, kernel_h, stride_h, padding_h, ADAPTIVE)
    left, right, width = _span(pixels % OW, W, OW, kernel_w, stride_w, padding_w, ADAPTIVE)
    image = (row // OH).to(tl.int64) * H
    if KIND == "max":
        total = tl.full((BLOCK_P, BLOCK_C), -(2**31), dtype=tl.int32)
    else:
        total = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.int32)
    for t in range(0, kernel_h * kernel_w):
        h, w = top + t // kernel_w, left + t % kernel_w
        is_within = in_pixels & (h < bottom) & (w < right)
        inside = is_within[:, None] & in_channels[None, :]
        place = ((image + h) * W + w)[:, None] * C + channels[None, :]
        steps = tl.load(x + place, mask=inside, other=0).to(tl.int32) - x_zero_point
        if KIND == "max":
            total = tl.maximum(total, tl.where(inside, steps, -(2**31)))
        else:
            total += tl.where(inside, steps, 0)
    real = total.to(tl.float32) * x_scale
    if KIND != "max":
        if HAS_DIVISOR:
            count = tl.zeros_like(height) + divisor
        elif COUNTS_PADDING:
            count = height * width
        else:
            count = (bottom - top) * (right - left)
        real = tl.div_rn(real, tl.zeros_like(real) + count.to(tl.float32)[:, None])
    real = activate(real, act_low, act_high, ACTIVATION)
    made = stored(real, out, out_scaling, out_zero_point, out_min, out_max, IS_INTEGER)
    out_place = pixels.to(tl.int64)[:, None] * C + channels[None, :]
    tl.store(
        out + out_place,
        made,
        mask=in_pixels[:, None] & in_channels[None, :],
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
    tiles: TileConfig | None = None,
    **output: Any,
) -> Tensor:
    """Launch the kernel; see `op.Int8Pool` for the arguments, `tiles` replaces the tables'.

    Images that are not channels-last are copied first.

    Raises:
        ConfigError: an unknown kind.
        InputError: a dtype that the kernel does not take, or no images.
        UnsupportedError: the GPU is too old.
    """
    chosen, end = check_kind(kind), Epilogue(**output)
    check_operands("int8_pool", {"x": (x, INTEGER_OUTPUTS)})
    if x.dim() != 4:
        raise InputError(f"int8_pool takes N, C, H, W images, found {tuple(x.shape)}")
    out = like_images(x, out_size, end.out_dtype)
    if out.numel() == 0:
        return out
    N, C, H, W = x.shape
    OH, OW = out_size
    widest = kernel
    if chosen is PoolKind.ADAPTIVE:
        both = ((H, OH), (W, OW))
        widest = [max(s.padded for s in spans(chosen, n, o, 0, 0, 0)) for n, o in both]
        stride = padding = (0, 0)
    block = tiles or tiles_for("int8_pool", x.device, shape_class(out_size))
    P = N * OH * OW
    grid = (triton.cdiv(P, block["BLOCK_P"]), triton.cdiv(C, block["BLOCK_C"]))
    with launching("int8_pool", label, x.device):
        int8_pool_kernel[grid](
            x=x.contiguous(memory_format=torch.channels_last),
            out=out,
            P=P,
            C=C,
            H=H,
            W=W,
            OH=OH,
            OW=OW,
            kernel_h=widest[0],
            kernel_w=widest[1],
            stride_h=stride[0],
            stride_w=stride[1],
            padding_h=padding[0],
            padding_w=padding[1],
            divisor=divisor,
            x_scale=x_scale,
            x_zero_point=x_zero_point,
            **output_launch_arguments(end),
            KIND=str(chosen),
            COUNTS_PADDING=counts_padding,
            HAS_DIVISOR=divisor != 0,
            # A fused multiply-add would skip a rounding that the definition has.
            enable_fp_fusion=False,
            **block.options(),
        )
    return out
