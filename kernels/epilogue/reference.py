"""The definition of an epilogue in plain torch."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from pt2e_quant.core.formats.float_codes import encode_float
from pt2e_quant.core.formats.number_formats import FP8_E4M3
from pt2e_quant.kernels.epilogue.epilogue import INTEGER_OUTPUTS, Activation, Epilogue

_FUNCTIONS: dict[Activation, Callable[[Tensor, Sequence[float]], Tensor]] = {
    Activation.NONE: lambda x, _: x,
    Activation.RELU: lambda x, _: x.clamp_min(0.0),
    Activation.CLAMP: lambda x, limits: x.clamp(limits[0], limits[1]),
    Activation.LEAKY_RELU: lambda x, limits: torch.where(x >= 0, x, x * limits[0]),
    Activation.GELU: lambda x, _: F.gelu(x),
    Activation.GELU_TANH: lambda x, _: F.gelu(x, approximate="tanh"),
    Activation.SILU: lambda x, _: F.silu(x),
    Activation.SIGMOID: lambda x, _: torch.sigmoid(x),
    Activation.TANH: lambda x, _: torch.tanh(x),
    Activation.HARDSWISH: lambda x, _: F.hardswish(x),
}


def activate(x: Tensor, activation: str, limits: Sequence[float] = ()) -> Tensor:
    """A pointwise function of float32 values."""
    return _FUNCTIONS[Activation(activation)](x, limits)


def requantize_real(real: Tensor, epilogue: Epilogue) -> Tensor:
    """Float32 values to the result's dtype: rounded to the nearest, ties to even; saturated."""
    if epilogue.out_dtype is torch.float8_e4m3fn:
        # A tensor: on a GPU torch multiplies by the inverse of a number.
        scale = torch.full((), epilogue.out_scale, dtype=torch.float32, device=real.device)
        return encode_float(real / scale, FP8_E4M3)
    if not epilogue.is_integer:
        return real.to(epilogue.out_dtype)
    low, high = (b - epilogue.out_zero_point for b in (epilogue.out_min, epilogue.out_max))
    # Clamping before the zero point is added is the same, and every step stays a float32.
    steps = torch.round(real * epilogue.inverse_scale).clamp(low, high)
    return (steps + epilogue.out_zero_point).to(epilogue.out_dtype)


def finish(real: Tensor, epilogue: Epilogue, *, channel_axis: int = -1) -> Tensor:
    """The result of a fused operator.

    Args:
        real: float32, the sums times their scales.
        epilogue: what follows.
        channel_axis: the axis of real that bias lies along.

    Returns:
        out_dtype, shaped like real.
    """
    if epilogue.bias is not None:
        shape = [1] * real.dim()
        shape[channel_axis] = -1
        real = real + epilogue.bias.float().reshape(shape)
    if epilogue.residual is not None:
        real = real + _real_residual(epilogue)
    return requantize_real(activate(real, epilogue.activation, epilogue.limits), epilogue)


def _real_residual(epilogue: Epilogue) -> Tensor:
    residual = epilogue.residual
    assert residual is not None
    if residual.dtype not in INTEGER_OUTPUTS:
        return residual.float()
    return (residual.float() - epilogue.residual_zero_point) * epilogue.residual_scale
