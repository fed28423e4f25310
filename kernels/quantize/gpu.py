"""quantize in Triton: elements in the order in which they lie in memory."""

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
from pt2e_quant.kernels.launch import ELEMENTS, check_operands, launching
from pt2e_quant.kernels.tiles import TileConfig, elements_class, tiles_for

__all__ = ["quantize", "quantize_kernel"]


@triton.jit(do_not_specialize=["x_zero_point", "out_zero_point", "out_min", "out_max"])
def quantize_kernel(
    x,
    out,
    size,
    x_scale,
    x_zero_point,
    act_low,
    act_high,
    out_scaling,
    out_zero_point,
    out_min,
    out_max,
    FROM_INTEGER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_INTEGER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK elements of x, wherever they stand in its shape."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    real = real_values(tl.load(x + at, mask=inside, other=0), x_scale, x_zero_point, FROM_INTEGER)
    real = activate(real, act_low, act_high, ACTIVATION)
    made = stored(real, out, out_scaling, out_zero_point, out_min, out_max, IS_INTEGER)
    tl.store(out + at, made, mask=inside)


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
