"""int8_add in Triton: results in the order in which they lie, operands by three strides."""

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
from pt2e_quant.kernels.int8_add.broadcast import Reading, result_like, walk_together
from pt2e_quant.kernels.int8_add.reference import check_combine
from pt2e_quant.kernels.launch import ELEMENTS, check_operands, launching
from pt2e_quant.kernels.tiles import TileConfig, elements_class, tiles_for


@triton.jit
def _places(at, middle, inner, outer_step, middle_step, inner_step, IS_FLAT: tl.constexpr):
    """Return the places of an operand's elements for results at these places."""
    if IS_FLAT:
        return at
    else:
        row = at // inner
        place = (at % inner) * inner_step + (row % middle) * middle_step
        return place + (row // middle) * outer_step


@triton.jit(
    do_not_specialize=["x_zero_point", "y_zero_point", "out_zero_point", "out_min", "out_max"]
)
def int8_add_kernel(
    x,
    y,
    out,
    size,
    middle,
    inner,
    x_outer,
    x_middle,
    x_inner,
    y_outer,
    y_middle,
    y_inner,
    x_scale,
    x_zero_point,
    y_scale,
    y_zero_point,
    act_low,
    act_high,
    out_scaling,
    out_zero_point,
    out_min,
    out_max,
    COMBINE: tl.constexpr,
    X_INTEGER: tl.constexpr,
    Y_INTEGER: tl.constexpr,
    X_FLAT: tl.constexpr,
    Y_FLAT: tl.constexpr,
    IS_LONG: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_INTEGER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK results; IS_LONG says that places pass 2**31."""
    program = tl.program_id(0).to(tl.int64) if IS_LONG else tl.program_id(0)
    at = program * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    x_at = _places(at, middle, inner, x_outer, x_middle, x_inner, X_FLAT)
    y_at = _places(at, middle, inner, y_outer, y_middle, y_inner, Y_FLAT)
    left = real_values(tl.load(x + x_at, mask=inside, other=0), x_scale, x_zero_point, X_INTEGER)
    right = real_values(tl.load(y + y_at, mask=inside, other=0), y_scale, y_zero_point, Y_INTEGER)
    if COMBINE == "add":
        real = left + right
    elif COMBINE == "sub":
        real = left - right
    else:
        tl.static_assert(COMBINE == "mul", "no such combination")
        real = left * right
    real = activate(real, act_low, act_high, ACTIVATION)
    made = stored(real, out, out_scaling, out_zero_point, out_min, out_max, IS_INTEGER)
    tl.store(out + at, made, mask=inside)


def int8_add(
    x: Tensor,
    y: Tensor,
    *,
    combine: str = "add",
    x_scale: float = 1.0,
    x_zero_point: int = 0,
    y_scale: float = 1.0,
    y_zero_point: int = 0,
    label: str = "",
    tiles: TileConfig | None = None,
    **output: Any,
) -> Tensor:
    """Launch the kernel; see `op.Int8Add` for the arguments, `tiles` replaces the tables'.

    Raises:
        ConfigError: an unknown combination.
        InputError: dtypes or devices that the kernel does not take.
        UnsupportedError: the GPU is too old.
    """
    check_combine(combine)
    end = Epilogue(**output)
    check_operands("int8_add", {"x": (x, ELEMENTS), "y": (y, ELEMENTS)})
    out = torch.empty_like(result_like(x, y), dtype=end.out_dtype)
    if out.numel() == 0:
        return out
    (_, middle, inner), (left, right) = walk_together(out, (x, y))
    chosen = tiles or tiles_for("int8_add", out.device, elements_class(out.numel()))
    with launching("int8_add", label, out.device):
        int8_add_kernel[(triton.cdiv(out.numel(), chosen["BLOCK"]),)](
            x=left.tensor,
            y=right.tensor,
            out=out,
            size=out.numel(),
            middle=middle,
            inner=inner,
            **_steps("x", left),
            **_steps("y", right),
            x_scale=x_scale,
            x_zero_point=x_zero_point,
            y_scale=y_scale,
            y_zero_point=y_zero_point,
            **output_launch_arguments(end),
            COMBINE=combine,
            IS_LONG=max(t.numel() for t in (out, x, y)) >= 2**31 - chosen["BLOCK"],
            # A fused multiply-add would skip a rounding that the definition has.
            enable_fp_fusion=False,
            **chosen.options(),
        )
    return out


def _steps(name: str, reading: Reading) -> dict[str, Any]:
    """An operand's launch arguments but for the tensor and its qparams."""
    outer, middle, inner = reading.strides
    return {
        f"{name}_outer": outer,
        f"{name}_middle": middle,
        f"{name}_inner": inner,
        f"{name.upper()}_FLAT": reading.is_flat,
        f"{name.upper()}_INTEGER": reading.tensor.dtype in INTEGER_OUTPUTS,
    }
