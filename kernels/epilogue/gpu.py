"""An epilogue in Triton: functions that kernels call on the values they hold in registers.

All arithmetic is float32, as the interpreter has no bfloat16 of its own.
"""

from typing import Any

import triton
import triton.language as tl

from pt2e_quant.kernels.epilogue.epilogue import INTEGER_OUTPUTS, Epilogue
from pt2e_quant.kernels.fused_op import is_interpreting

_INTERPRETS = tl.constexpr(is_interpreting())


@triton.jit
def round_half_even(x):
    """The nearest integer, ties to even; for |x| < 2**22, where adding 1.5 * 2**23 drops halves."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _exp(x):
    # Short of overflow: 1 / (1 + e**80) is 0 beside any float32 that it is added to or scales.
    return tl.exp(tl.minimum(x, 80.0))


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (_exp(2.0 * x) + 1.0)


@triton.jit
def activate(x, low, high, ACTIVATION: tl.constexpr):
    """A pointwise function of float32 values; low is the slope of leaky_relu."""
    if ACTIVATION == "relu":
        return tl.maximum(x, 0.0)
    elif ACTIVATION == "clamp":
        return tl.minimum(tl.maximum(x, low), high)
    elif ACTIVATION == "leaky_relu":
        return tl.where(x >= 0.0, x, x * low)
    elif ACTIVATION == "gelu":
        return x * (0.5 * (1.0 + tl.erf(x * 0.7071067811865476)))
    elif ACTIVATION == "gelu_tanh":
        return 0.5 * x * (1.0 + _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == "silu":
        return x / (1.0 + _exp(-x))
    elif ACTIVATION == "sigmoid":
        return 1.0 / (1.0 + _exp(-x))
    elif ACTIVATION == "tanh":
        return _tanh(x)
    elif ACTIVATION == "hardswish":
        # A plain division is approximate on a GPU, by two last bits.
        return tl.div_rn(x * tl.minimum(tl.maximum(x + 3.0, 0.0), 6.0), tl.zeros_like(x) + 6.0)
    else:
        tl.static_assert(ACTIVATION == "none", "no such activation")
        return x


@triton.jit
def requantize(real, inverse_scale, zero_point, low, high):
    """Int32 steps of an integer result: clamp(round(real * inverse_scale) + zero_point, low, high).

    Clamped before rounding: the limits are integers, so that this is the same.
    """
    least = (low - zero_point).to(tl.float32)
    greatest = (high - zero_point).to(tl.float32)
    steps = tl.minimum(tl.maximum(real * inverse_scale, least), greatest)
    return round_half_even(steps).to(tl.int32) + zero_point


@triton.jit
def e4m3_codes(x):
    """Codes (float8e4nv) of float32 values: nearest, ties to even, saturated; NaN stays NaN."""
    return _e4m3_bytes(x, _INTERPRETS).to(tl.float8e4nv, bitcast=True)


@triton.jit
def _e4m3_bytes(x, EMULATE: tl.constexpr):
    """The bits of `e4m3_codes`, uint8.

    Not by Triton's cast, which goes through float16 below sm_90 and so rounds twice, and which
    truncates in the interpreter.
    """
    if EMULATE:
        return _e4m3_in_integers(x)
    else:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }
            """,
            "=r,f,f,f,f",
            [x],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )


@triton.jit
def _e4m3_in_integers(x):
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    is_nan = size > 0x7F800000
    size = tl.minimum(size, 0x43E00000)  # 448
    # The power of two at or below, at least 2**-6. Adding 1.5 * 2**20 of it drops all but three
    # bits of the fraction and leaves the steps of an eighth in the low bits.
    power = tl.maximum(size & 0x7F800000, 0x3C800000)
    anchor = power + 0x0A400000
    sum_bits = size.to(tl.float32, bitcast=True) + anchor.to(tl.float32, bitcast=True)
    steps = sum_bits.to(tl.int32, bitcast=True) - anchor
    code = tl.where(is_nan, 0x7F, (power >> 20) - 968 + steps)
    code |= (bits >> 24) & 0x80
    return code.to(tl.uint8)


@triton.jit
def write_result(
    real, place, inside, residual, out, residual_scale, residual_zero_point, act_low, act_high,
    out_scaling, out_zero_point, out_min, out_max,
    RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr, IS_INTEGER: tl.constexpr,
):  # fmt: skip
    """All that follows the bias, for values at `place` of out and residual; see `Epilogue`."""
    if RESIDUAL == "integer":
        added = tl.load(residual + place, mask=inside, other=0).to(tl.int32)
        real += (added - residual_zero_point).to(tl.float32) * residual_scale
    elif RESIDUAL == "float":
        real += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    real = activate(real, act_low, act_high, ACTIVATION)
    made = stored(real, out, out_scaling, out_zero_point, out_min, out_max, IS_INTEGER)
    tl.store(out + place, made, mask=inside)


def launch_arguments(end: Epilogue) -> dict[str, Any]:
    """An epilogue as arguments of a launch, by the names that kernels have for them."""
    kind = "none"
    if end.residual is not None:
        kind = "integer" if end.residual.dtype in INTEGER_OUTPUTS else "float"
    return {
        "residual": None if end.residual is None else end.residual.contiguous(),
        "residual_scale": end.residual_scale,
        "residual_zero_point": end.residual_zero_point,
        "HAS_BIAS": end.bias is not None,
        "RESIDUAL": kind,
        **output_launch_arguments(end),
    }


def output_launch_arguments(end: Epilogue) -> dict[str, Any]:
    """Launch arguments from the activation on, for kernels without bias and residual."""
    limits = (*end.limits, 0.0, 0.0)
    return {
        "act_low": limits[0],
        "act_high": limits[1],
        "out_scaling": end.scaling,
        "out_zero_point": end.out_zero_point,
        "out_min": end.out_min,
        "out_max": end.out_max,
        "ACTIVATION": str(end.activation),
        "IS_INTEGER": end.is_integer,
    }


@triton.jit
def real_values(loaded, scale, zero_point, IS_INTEGER: tl.constexpr):
    """Float32 of what was loaded: (integer - zero_point) * scale, or the floats themselves."""
    if IS_INTEGER:
        return (loaded.to(tl.int32) - zero_point).to(tl.float32) * scale
    else:
        return loaded.to(tl.float32)


@triton.jit
def stored(real, out, out_scaling, zero_point, low, high, IS_INTEGER: tl.constexpr):
    """Float32 values as the dtype that out points to; out_scaling is `Epilogue.scaling`."""
    if IS_INTEGER:
        return requantize(real, out_scaling, zero_point, low, high).to(out.dtype.element_ty)
    elif out.dtype.element_ty == tl.float8e4nv:
        return e4m3_codes(tl.div_rn(real, tl.zeros_like(real) + out_scaling))
    else:
        return real.to(out.dtype.element_ty)
