"""An epilogue in Triton: functions that kernels call on the values they hold in registers.

All arithmetic is float32, as the interpreter has no bfloat16 of its own.
"""

import triton
import triton.language as tl

__all__ = ["activate", "requantize", "round_half_even"]


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
        return x * tl.minimum(tl.maximum(x + 3.0, 0.0), 6.0) / 6.0
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
