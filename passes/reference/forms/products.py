"""Forms of products with a constant weight: linear and convolutions, static or dynamic."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pt2e_quant.core.integer_ops.calls import cast
from pt2e_quant.core.integer_ops.products import Window, convolve, multiply_rows
from pt2e_quant.graph.ops import CONV, LINEAR, aten
from pt2e_quant.passes.reference.forms.site import Declined, IntegerForm, Operand, Site

__all__ = ["PRODUCT_FORMS"]

_INT32 = (1 << 31) - 1


def _linear(site: Site[Any]) -> Any:
    return _product(site, None)


def _convolution(site: Site[Any]) -> Any:
    return _product(site, _window(site))


def _product(site: Site[Any], window: Window | None) -> Any:
    x, weight = site.arguments["input"], _weight(site)
    if not isinstance(x, Operand):
        raise Declined("its input is float")
    channels = (-1,) if window is None else (-1, *[1] * len(window.stride))
    if x.run_time is not None:
        return _dynamic(site, x, weight, window, channels)
    scale = x.qparams.scale * weight.qparams.scale
    bias = _bias(site, scale)
    _check_sum(x, weight, 0 if bias is None else int(bias.abs().max()))
    if site.output is not None:
        site.required_output()  # declines before anything is held
    held = None
    if bias is not None:
        held = site.hold(bias.to(torch.int32).reshape(channels), "bias_q")
    total = _accumulate(site, x, weight, window, x.qparams.zero_point_int, held)
    if site.output is None:
        return _as_float(site, total, _per_channel(scale, channels))
    return site.requantized(total, (x.qparams.scale, _per_channel(weight.qparams.scale, channels)))


def _weight(site: Site[Any]) -> Operand[Any]:
    weight = site.arguments["weight"]
    is_known = isinstance(weight, Operand) and weight.is_constant and weight.run_time is None
    if not is_known:
        raise Declined("weight or its scale is no constant of this graph")
    if weight.qparams.axis not in (None, 0):
        raise Declined(f"weight is quantized along axis {weight.qparams.axis}")
    if weight.qparams.zero_point.is_floating_point():
        raise Declined("weight has zero points that are no integers")
    found: Operand[Any] = weight
    return found


def _accumulate(
    site: Site[Any],
    x: Operand[Any],
    weight: Operand[Any],
    window: Window | None,
    x_zero: Any,
    bias: Any,
) -> Any:
    """The exact sum of products in int32."""
    zeros = weight.qparams.zero_point
    if zeros.numel() > 1:
        zeros = zeros.reshape(-1, *[1] * (weight.like.dim() - 1))
    w_zero = site.literal(zeros, "weight_zero") if bool((zeros != 0).any()) else 0
    given: dict[str, Any] = {
        "x_zero_point": x_zero,
        "weight_zero_point": w_zero,
        "x_storage": x.storage,
        "weight_storage": weight.storage,
    }
    if window is None:
        return multiply_rows(site.call, x.value, weight.value, bias, **given)
    return convolve(site.call, x.value, weight.value, bias, window, **given)


def _per_channel(values: Tensor, channels: tuple[int, ...]) -> Tensor:
    """Values for all channels, or for each, shaped to broadcast against the result."""
    return values if values.numel() == 1 else values.reshape(channels)


def _check_sum(x: Operand[Any], weight: Operand[Any], bias: int) -> None:
    """Decline a sum that int32 may not hold."""
    terms = weight.like.numel() // max(1, weight.like.shape[0])
    if terms * x.reach * weight.reach + bias > _INT32:
        raise Declined("the sum of products may not fit in int32")


def _as_float(site: Site[Any], total: Any, scale: Tensor) -> Any:
    """A result that stays float: the accumulator times its scale."""
    held = site.literal(scale, "scale")
    real = site.call(aten.mul.Tensor, cast(site.call, total, torch.float32), held)
    dtype = site.like.dtype
    return real if dtype is torch.float32 else cast(site.call, real, dtype)


def _dynamic(
    site: Site[Any],
    x: Operand[Any],
    weight: Operand[Any],
    window: Window | None,
    channels: tuple[int, ...],
) -> Any:
    """An input whose qparams are chosen at run time; the bias stays float."""
    if site.output is not None:
        raise Declined("its input's qparams are chosen at run time, its output's are fixed")
    _check_sum(x, weight, 0)
    assert x.run_time is not None
    call, (x_scale, x_zero) = site.call, x.run_time
    # In the width of the difference, so that nothing is promoted.
    wide = torch.int16 if x.storage.itemsize == 1 else torch.int32
    total = _accumulate(site, x, weight, window, cast(call, x_zero, wide), None)
    weight_scale = site.literal(_per_channel(weight.qparams.scale, channels), "scale")
    scale = call(aten.mul.Tensor, cast(call, x_scale, torch.float32), weight_scale)
    real = call(aten.mul.Tensor, cast(call, total, torch.float32), scale)
    bias = site.arguments["bias"]
    if bias is not None:
        held = site.hold(bias, "bias") if isinstance(bias, Tensor) else bias
        real = call(aten.add.Tensor, real, call(aten.reshape.default, held, list(channels)))
    dtype = site.like.dtype
    return real if dtype is torch.float32 else cast(call, real, dtype)


def _bias(site: Site[Any], scale: Tensor) -> Tensor | None:
    """The bias in steps of the accumulator: int64[N], None if there is none."""
    bias = site.arguments["bias"]
    if bias is None:
        return None
    if not isinstance(bias, Tensor):
        raise Declined("bias is computed at run time")
    return torch.round(bias.double() / scale.double()).to(torch.int64)


def _window(site: Site[Any]) -> Window:
    given = site.arguments
    weight = _weight(site)
    kernel = weight.like.shape[2:]
    rank = len(kernel)
    if site.like.dim() != rank + 2:
        raise Declined("input has no batch dimension")
    dilation = _each(given["dilation"], rank)
    padding = given["padding"]
    if padding == "valid":
        padding = [0] * rank
    elif padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        if any(t % 2 for t in total):
            raise Declined('padding "same" is uneven')
        padding = [t // 2 for t in total]
    return Window(
        stride=_each(given["stride"], rank),
        padding=_each(padding, rank),
        dilation=dilation,
        groups=given["groups"],
    )


def _each(given: Sequence[int], rank: int) -> list[int]:
    return list(given) * rank if len(given) == 1 else list(given)


PRODUCT_FORMS = (
    IntegerForm(name="linear", operators=LINEAR, write=_linear, is_for_float=True),
    IntegerForm(name="convolution", operators=CONV, write=_convolution, is_for_float=True),
)
"""Products with a constant weight."""
