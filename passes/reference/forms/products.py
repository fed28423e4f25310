"""Forms of products, and of the rows of an embedding."""

from typing import Any

import torch
from torch import Tensor

from pt2e_quant.core.integer_ops.calls import cast, widen
from pt2e_quant.core.integer_ops.products import Window, convolve, multiply_rows
from pt2e_quant.core.integer_ops.profiles import Bias
from pt2e_quant.core.integer_ops.windows import GroupLinear, Matmul
from pt2e_quant.graph.ops import (
    ADDMM,
    BMM,
    CONV,
    CONV_TRANSPOSE,
    EMBEDDING,
    LINEAR,
    MATMUL,
    MM,
    aten,
    each_axis,
    each_padding,
)
from pt2e_quant.graph.pattern import one_of
from pt2e_quant.passes.reference.forms.site import (
    UNKNOWN_LENGTH,
    Declined,
    IntegerForm,
    Operand,
    Overflow,
    Site,
)

_INT32 = (1 << 31) - 1


def _linear(site: Site[Any]) -> Any:
    return _product(site, None)


def _convolution(site: Site[Any]) -> Any:
    return _product(site, _window(site))


def _transposed(site: Site[Any]) -> Any:
    given, weight = site.arguments, _weight(site, axis=1)
    rank = weight.like.dim() - 2
    if given["groups"] > 1 and weight.qparams.axis is not None:
        raise Declined("the channels of its groups share scales")
    window = Window(
        stride=each_axis(given["stride"], rank),
        padding=each_axis(given["padding"], rank),
        dilation=each_axis(given["dilation"], rank),
        groups=given["groups"],
        output_padding=each_axis(given["output_padding"], rank),
    )
    return _product(site, window)


def _matmul(site: Site[Any]) -> Any:
    """Two quantized matrices, or batches of them; the right one may have a scale a column."""
    names = [n for n in ("mat1", "self", "mat2", "other") if n in site.arguments]
    left, right = names[-2:] if "mat1" not in names else ("mat1", "mat2")
    x, y = site.operand(left), site.operand(right)
    if y.like.dim() < 2 or x.like.dim() < 2:
        raise Declined("it multiplies a vector")
    axis = y.qparams.axis
    if axis not in (None, y.like.dim() - 1) or y.qparams.group_size is not None:
        raise Declined(f"its right side is quantized along axis {axis}")
    if axis is not None and bool((y.qparams.zero_point != 0).any()):
        raise Declined("the columns of its right side have zero points")
    scale = x.qparams.scale * y.qparams.scale
    bias = _bias_of_addmm(site, scale)
    terms, bits = x.like.shape[-1], site.arithmetic.accumulator_bits
    if isinstance(terms, int):
        _check_length(site, terms, x, y, 0 if bias is None else int(bias.abs().max()))
    else:
        bits = 64  # no length is known that int32 would hold
    y_zero = 0 if axis is not None else y.qparams.zero_point_int
    x_steps = widen(site.call, x.value, x.qparams.zero_point_int, x.storage)
    y_steps = widen(site.call, y.value, y_zero, y.storage)
    total = site.call(Matmul, x_steps, y_steps, bits)
    if bias is not None:
        held = site.hold(bias.to(_accumulator(site)), "bias_q")
        total = site.call(aten.add.Tensor, total, held)
    if site.output is None:
        return _as_float(site, total, scale)
    scales = x.qparams.scale, y.qparams.scale
    reach = (terms if isinstance(terms, int) else UNKNOWN_LENGTH) * x.reach * y.reach
    return site.requantized(total, scales, reach=reach)


def _bias_of_addmm(site: Site[Any], scale: Tensor) -> Tensor | None:
    if "mat1" not in site.arguments:
        return None
    if site.arguments["beta"] != 1 or site.arguments["alpha"] != 1:
        raise Declined("it scales its summands")
    bias = site.arguments["self"]
    if not isinstance(bias, Tensor):
        raise Declined("bias is computed at run time")
    return torch.round(bias.double() / scale.double()).to(torch.int64)


_GROUP_BITS = 30


def _grouped(site: Site[Any], x: Operand[Any], weight: Operand[Any]) -> Any:
    """A linear whose weight has a scale for each group of a row.

    Each group is summed in int32. A row's sums are added in int64 after each is multiplied by its
    scale over the row's greatest, in 30 bits.
    """
    scales = weight.qparams.scale
    size = weight.qparams.group_size
    assert size is not None
    if bool((weight.qparams.zero_point != 0).any()):
        raise Declined("the groups of its weight have zero points")
    _check_length(site, size, x, weight)
    reach = size * x.reach * weight.reach * scales.shape[1]
    bits = min(_GROUP_BITS, 62 - reach.bit_length())
    greatest = scales.amax(1, keepdim=True)
    multipliers = (scales.double() / greatest * 2.0**bits).round().to(torch.int64)
    row_scale = greatest.flatten() * 2.0**-bits
    call = site.call
    zero = x.qparams.zero_point_int if x.run_time is None else _wide_zero(site, x)
    steps = widen(call, x.value, zero, x.storage)
    total = call(GroupLinear, steps, weight.value, site.hold(multipliers, "group_factors"))
    if x.run_time is not None:
        return _finish_dynamic(site, x, total, row_scale, (-1,))
    scale = x.qparams.scale * row_scale
    bias = _bias(site, scale)
    if bias is not None:
        total = call(aten.add.Tensor, total, site.hold(bias, "bias_q"))
    if site.output is None:
        return _as_float(site, total, scale)
    return site.requantized(total, (x.qparams.scale, row_scale), reach=reach << bits)


def _embedding(site: Site[Any]) -> Any:
    """The integer rows of a table, brought to the scale of the output."""
    weight, index = _weight(site), site.arguments["indices"]
    rows = site.call(aten.embedding.default, weight.value, index)
    zero: Any = weight.qparams.zero_point
    scale: Any = weight.qparams.scale
    if weight.qparams.axis is None:
        if site.output is not None:
            wide = widen(site.call, rows, weight.qparams.zero_point_int, weight.storage)
            return site.requantized(wide, (scale,))
    if site.output is not None:
        raise Declined("each row of its weight has a scale of its own, and its output has one")
    held_zero = 0
    if bool((zero != 0).any()):
        held_zero = _row_of(site, zero, "zero", index)
    wide = widen(site.call, rows, held_zero, weight.storage)
    real = cast(site.call, wide, torch.float32)
    made = site.call(aten.mul.Tensor, real, _row_of(site, scale, "scale", index))
    return made if site.like.dtype is torch.float32 else cast(site.call, made, site.like.dtype)


def _row_of(site: Site[Any], values: Tensor, name: str, index: Any) -> Any:
    """The value of each row that is looked up."""
    if values.numel() == 1:
        return values.item()
    return site.call(aten.embedding.default, site.hold(values.reshape(-1, 1), name), index)


def _product(site: Site[Any], window: Window | None) -> Any:
    is_transposed = window is not None and window.output_padding is not None
    x, weight = site.arguments["input"], _weight(site, axis=1 if is_transposed else 0)
    if not isinstance(x, Operand):
        raise Declined("its input is float")
    channels = (-1,) if window is None else (-1, *[1] * len(window.stride))
    if weight.qparams.group_size is not None:
        return _grouped(site, x, weight)
    if x.run_time is not None:
        return _dynamic(site, x, weight, window, channels)
    scale = x.qparams.scale * weight.qparams.scale
    bias, real_bias = _bias(site, scale), None
    reach = _check_sum(site, x, weight, 0 if bias is None else int(bias.abs().max()))
    if site.output is not None:
        site.required_output()  # declines before anything is held
    held = None
    if bias is not None and site.arithmetic.profile.bias is Bias.REAL:
        real_bias = site.hold(site.arguments["bias"].detach().float().reshape(channels), "bias")
    elif bias is not None:
        held = site.hold(bias.to(_accumulator(site)).reshape(channels), "bias_q")
    total = _accumulate(site, x, weight, window, x.qparams.zero_point_int, held)
    if site.output is None:
        return _as_float(site, total, _per_channel(scale, channels), real_bias)
    scales = x.qparams.scale, _per_channel(weight.qparams.scale, channels)
    return site.requantized(total, scales, reach=reach, bias=real_bias)


def _weight(site: Site[Any], axis: int = 0) -> Operand[Any]:
    weight = site.arguments["weight"]
    is_known = isinstance(weight, Operand) and weight.is_constant and weight.run_time is None
    if not is_known:
        raise Declined("weight or its scale is no constant of this graph")
    if weight.qparams.axis not in (None, axis):
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
        shape = [1] * weight.like.dim()
        shape[weight.qparams.axis or 0] = -1
        zeros = zeros.reshape(shape)
    w_zero = site.literal(zeros, "weight_zero") if bool((zeros != 0).any()) else 0
    given: dict[str, Any] = {
        "x_zero_point": x_zero,
        "weight_zero_point": w_zero,
        "x_storage": x.storage,
        "weight_storage": weight.storage,
        "bits": site.arithmetic.accumulator_bits,
    }
    if window is None:
        return multiply_rows(site.call, x.value, weight.value, bias, **given)
    is_batch = site.like.dim() == len(window.stride) + 2
    values = x.value if is_batch else site.call(aten.unsqueeze.default, x.value, 0)
    total = convolve(site.call, values, weight.value, bias, window, **given)
    return total if is_batch else site.call(aten.squeeze.dim, total, 0)


def _per_channel(values: Tensor, channels: tuple[int, ...]) -> Tensor:
    """Values for all channels, or for each, shaped to broadcast against the result."""
    return values if values.numel() == 1 else values.reshape(channels)


def _accumulator(site: Site[Any]) -> torch.dtype:
    return torch.int32 if site.arithmetic.accumulator_bits == 32 else torch.int64


def _check_sum(site: Site[Any], x: Operand[Any], weight: Operand[Any], bias: int) -> int:
    """The reach of a sum; refuses one that int32 may not hold."""
    terms = weight.like.numel() // max(1, weight.like.shape[weight.qparams.axis or 0])
    return _check_length(site, terms, x, weight, bias)


def _check_length(
    site: Site[Any], terms: int, x: Operand[Any], y: Operand[Any], bias: int = 0
) -> int:
    most = terms * x.reach * y.reach + bias
    if most > _INT32 and site.arithmetic.accumulator_bits == 32:
        raise Overflow(f"the sum of products may not fit in int32: {terms} products reach {most}")
    return most


def _as_float(site: Site[Any], total: Any, scale: Tensor, bias: Any = None) -> Any:
    """A result that stays float: the accumulator times its scale, and a bias in real units."""
    held = site.literal(scale, "scale")
    real = site.call(aten.mul.Tensor, cast(site.call, total, torch.float32), held)
    if bias is not None:
        real = site.call(aten.add.Tensor, real, bias)
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
    _check_sum(site, x, weight, 0)
    total = _accumulate(site, x, weight, window, _wide_zero(site, x), None)
    return _finish_dynamic(site, x, total, _per_channel(weight.qparams.scale, channels), channels)


def _wide_zero(site: Site[Any], x: Operand[Any]) -> Any:
    """The zero point in the width of the difference, so that nothing is promoted."""
    assert x.run_time is not None
    wide = torch.int16 if x.storage.itemsize == 1 else torch.int32
    return cast(site.call, x.run_time[1], wide)


def _finish_dynamic(
    site: Site[Any],
    x: Operand[Any],
    total: Any,
    weight_scales: Tensor,
    channels: tuple[int, ...],
) -> Any:
    if site.output is not None:
        raise Declined("its input's qparams are chosen at run time, its output's are fixed")
    assert x.run_time is not None
    call, x_scale = site.call, x.run_time[0]
    weight_scale = site.literal(weight_scales, "scale")
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
    if site.arithmetic.profile.bias is Bias.FLOAT32:
        return torch.round(bias.float() * (1.0 / scale)).to(torch.int64)
    return torch.round(bias.double() / scale.double()).to(torch.int64)


def _window(site: Site[Any]) -> Window:
    given = site.arguments
    weight = _weight(site)
    kernel = weight.like.shape[2:]
    rank = len(kernel)
    dilation = each_axis(given["dilation"], rank)
    pads = each_padding(given["padding"], kernel, dilation)
    if any(before != behind for before, behind in pads):
        raise Declined('padding "same" is uneven')
    return Window(
        stride=each_axis(given["stride"], rank),
        padding=[pad for pad, _ in pads],
        dilation=dilation,
        groups=given["groups"],
    )


PRODUCT_FORMS = (
    IntegerForm(name="linear", operators=LINEAR, write=_linear, is_for_float=True),
    IntegerForm(name="convolution", operators=CONV, write=_convolution, is_for_float=True),
    IntegerForm(
        name="transposed convolution",
        operators=CONV_TRANSPOSE,
        write=_transposed,
        is_for_float=True,
    ),
    IntegerForm(
        name="matmul",
        operators=one_of(MATMUL, BMM, MM, ADDMM),
        write=_matmul,
        is_for_float=True,
    ),
    IntegerForm(name="embedding", operators=EMBEDDING, write=_embedding, is_for_float=True),
)
"""Products of two tensors, and the rows of a table."""
