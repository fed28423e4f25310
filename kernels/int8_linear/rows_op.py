"""The operator `pt2e_quant::int8_linear_rows`: oneDNN's product, scaled row by row."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.kernels.epilogue.epilogue import EPILOGUE_SCHEMA, Epilogue
from pt2e_quant.kernels.epilogue.reference import finish
from pt2e_quant.kernels.fused_op import fake_linear
from pt2e_quant.kernels.onednn.operators import QLinear
from pt2e_quant.kernels.profiler_range import profiler_range
from pt2e_quant.kernels.quantize_per_token.cpu_dynamic import qparams_of_one, quantize_per_token

_LIBRARY = torch.library.Library("pt2e_quant", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's own
_ONE, _ZERO = torch.ones(1), torch.zeros(1, dtype=torch.int32)
_LARGEST = 2**24
"""Up to which float32 has every integer."""


def sums_fit_float(weight: Tensor) -> bool:
    """True if no sum of products of uint8 values by a row of weight leaves float32's integers.

    Args:
        weight: int8[N, K].
    """
    if weight.numel() == 0:
        return True
    up = weight.clamp_min(0).sum(1, dtype=torch.int64)
    down = up - weight.sum(1, dtype=torch.int64)
    return int(torch.maximum(up, down).max()) * 255 <= _LARGEST


def _product(
    x: Tensor, packed: Tensor, scale: Tensor = _ONE, zero: Tensor = _ZERO, *, zero_point: int = 0
) -> Tensor:
    """uint8[M, K] by a packed int8 weight, the integer sums times scale as float32[M, N]."""
    made: Tensor = QLinear(
        x, 1.0, zero_point, packed, scale, zero, None, 1.0, 0, torch.float32, "none", [0.0], ""
    )
    return made


def linear_of_quantized_rows(
    x: Tensor, packed: Tensor, weight_scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    """`Int8LinearRows` of what `quantize_per_token` makes of float32 rows, to the last bit.

    One row by a small weight waits for calls: it takes half of those that both operators do.
    """
    qparams = qparams_of_one(x) if x.numel() == x.shape[-1] else None
    if qparams is None:
        rows = quantize_per_token(x)
        made: Tensor = Int8LinearRows(*rows, packed, weight_scale, None, bias=bias)
        return made
    scale, zero = qparams
    steps = x.double().mul_(1.0 / scale).add_(zero).round_().clamp_(-128, 127).add_(128)
    unsigned = steps.to(torch.uint8)
    real = _product(unsigned, packed, weight_scale * scale, zero_point=zero + 128)
    return real if bias is None else real.add_(bias)


def written_out(
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor,
    packed: Tensor,
    weight_scale: Tensor,
    weight_sum: Tensor | None,
    *,
    product: Callable[..., Tensor] | None = None,
    label: str = "",
    **epilogue: Any,
) -> Tensor:
    """`Int8LinearRows` in torch's operators, for tracers: around the product a compiler fuses it.

    Each step rounds as the operator's does. It is not checked that oneDNN is exact here. `product`
    takes the place of oneDNN's where a compiler is not to see that: of uint8[M, K] and packed, it
    gives the integer sums as float32[M, N].
    """
    unsigned = _unsigned(x.reshape(-1, x.shape[-1]))
    if weight_sum is None:
        unsigned = torch.cat([unsigned, unsigned.new_ones(1, x.shape[-1])])
    if product is None:
        one, zero = torch.ones(1), torch.zeros(1, dtype=torch.int32)  # a tracer takes no tensor in
        real = _product(unsigned, packed, one, zero)
    else:
        real = product(unsigned, packed)
    if weight_sum is None:
        real, weight_sum = real[:-1], real[-1]
    shift = x_zero_point.reshape(-1, 1).float() + 128.0
    real = real - shift * weight_sum
    real = real * (x_scale.reshape(-1, 1) * weight_scale)
    shape = (*x.shape[:-1], weight_scale.shape[0])
    return finish(real.reshape(shape), Epilogue(**epilogue))


def _scaled(
    rows: Tensor,
    packed: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor,
    weight_scale: Tensor,
    weight_sum: Tensor | None,
) -> Tensor:
    """The product of rows that have a scale and a zero point each, in memory of one result."""
    if weight_sum is not None:
        real = _product(_unsigned(rows), packed)
    else:
        # One row more, of ones, gives the sums of the weight's rows.
        M, K = rows.shape
        padded = rows.new_empty((M + 1, K))
        torch.bitwise_xor(rows, -128, out=padded[:M])
        padded[M].fill_(1)
        sums = _product(padded.view(torch.uint8), packed)
        real, weight_sum = sums[:M], sums[M]
    # Both terms are integers that float32 has, so the difference is rounded once, as the
    # definition rounds the int32 sum.
    scale = x_zero_point.reshape(-1, 1).float().add_(128.0) * weight_sum
    real.sub_(scale)
    torch.mul(x_scale.reshape(-1, 1), weight_scale, out=scale)
    return real.mul_(scale)


def _unsigned(rows: Tensor) -> Tensor:
    return rows.bitwise_xor(-128).view(torch.uint8)


def _run(
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor,
    packed: Tensor,
    weight_scale: Tensor,
    weight_sum: Tensor | None,
    *,
    label: str = "",
    **epilogue: Any,
) -> Tensor:
    if x.dtype is not torch.int8:
        raise UnsupportedError(
            f"int8_linear_rows takes int8 activations, found {x.dtype}",
            fix="quantize them with pt2e_quant::quantize_per_token",
        )
    shape = (*x.shape[:-1], weight_scale.shape[0])
    if x.numel() == 0:
        return finish(x.new_zeros(shape, dtype=torch.float32), Epilogue(**epilogue))
    # Called in grad mode, steps into buffers would ask autograd for what they have no gradient of.
    with torch.no_grad(), profiler_range("int8_linear_rows", label):
        rows = x.reshape(-1, x.shape[-1])
        if x_scale.numel() == 1:
            # oneDNN does the same steps itself: one row by a small weight waits for little else.
            scale = x_scale.reshape(1) * weight_scale
            zero_point = int(x_zero_point) + 128
            real = _product(_unsigned(rows), packed, scale, zero_point=zero_point)
        else:
            real = _scaled(rows, packed, x_scale, x_zero_point, weight_scale, weight_sum)
        bias = epilogue.pop("bias", None)
        if bias is not None:  # here rather than in the epilogue, which would allocate the sum
            real.add_(bias)
        return finish(real.reshape(shape), Epilogue(**epilogue))


_LIBRARY.define(  # type: ignore[no-untyped-call]
    "int8_linear_rows(Tensor x, Tensor x_scale, Tensor x_zero_point, Tensor packed, "
    f'Tensor weight_scale, Tensor weight_sum, *, {EPILOGUE_SCHEMA}, str label="") -> Tensor'
)
torch.library.impl(_LIBRARY, "int8_linear_rows", "CompositeExplicitAutograd")(_run)
torch.library.register_fake("pt2e_quant::int8_linear_rows", lib=_LIBRARY)(
    fake_linear(weight=4, axis=0)
)

Int8LinearRows = torch.ops.pt2e_quant.int8_linear_rows.default
"""`int8_linear` on oneDNN's packed weight, equal to the definition to the last bit.

    packed: `pack_onednn_linear(weight, None)` of an int8[N, K] that `sums_fit_float` and
        `multiplies_exactly` hold for.
    weight_sum: float32[N], the sum of each row of weight; None multiplies by one row more instead.

The other arguments are those of `op.Int8Linear`.
"""
