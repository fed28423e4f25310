"""The operator `pt2e_quant::linear_of_limbs`: float32 rows times integer weights, on oneDNN.

oneDNN has no product of float activations by integer weights, and torch's own
(`_weight_int8pack_mm`, `_weight_int4pack_mm_for_cpu`, `_dyn_quant_matmul_4bit`) measured 3 to 100
times slower than float with float32 activations. But two integer products per row are faster than
one float product: each row is written in 16 bits, as two limbs of 8, and both go through one
call.
"""

from typing import Any

import torch
from torch import Tensor

from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.kernels.onednn.operators import QLinear, aten

_LIBRARY = torch.library.Library("pt2e_quant", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's own

LIMB_LIMIT = 32639
"""The largest t = 256 h + l with both limbs from -128 to 127 and -t of that form as well."""
_LEAST = 2.0**-100
"""Rows and weights below it count as this much: the scale of nothing stays a normal number."""
_FEW = 1 << 13
"""Up to how many activations gathering single bytes is faster than two copies of all."""
_MAGIC = float(2**23 + 128 * 257)
"""Added to t, the float's last 16 bits are the limbs, each 128 above what it stands for.

From 2^23 on a float32's step is 1, so the addition also rounds, to the nearest even.
"""


def limb_shifts(dims: int) -> Tensor:
    """Return the shift of each limb of an activation of so many dimensions, low limb first.

    >>> limb_shifts(2).shape
    torch.Size([2, 1, 1])
    """
    return torch.tensor([0, 8], dtype=torch.int32).reshape(2, *[1] * dims)


def weight_limbs(real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A weight in 16 bits of its row's largest: high and low limb int8[N, K], scale float32[N].

    real is within half a scale of (256 high + low) * scale.

    Args:
        real: float32[N, K].

    >>> high, low, scale = weight_limbs(torch.tensor([[32639.0, -1000.0, 3.0]]))
    >>> high.tolist(), low.tolist(), scale.tolist()
    ([[127, -4, 0]], [[127, 24, 3]], [1.0])
    """
    scale = real.abs().amax(1).clamp_min(_LEAST) / LIMB_LIMIT
    steps = (real.double() / scale.double().unsqueeze(1)).round_()
    steps = steps.clamp_(-LIMB_LIMIT, LIMB_LIMIT).to(torch.int32)
    high = (steps + 128) >> 8
    return high.to(torch.int8), (steps - 256 * high).to(torch.int8), scale


def error_bound(x: Tensor, weight: Tensor, bias: Tensor | None, *, low: bool) -> Tensor:
    """Return the bound of the operator's error against the exact sums: float64[M, N].

    With s the largest |x| of a row over 32639 and r that of a weight's row, a row is within
    s (1/2 + 2^-6) of its limbs, the 2^-6 for rounding x / s and the sums to float32; a weight in
    two limbs is within r (1/2 + 2^-6) of them. The result and the bias are rounded to float32.

    Args:
        x: float32[M, K], finite.
        weight: float32[N, K], what is multiplied.
        bias: float32[N] or None.
        low: whether the weight is in two limbs.
    """
    x, weight = x.double().abs(), weight.double().abs()
    half = (0.5 + 2.0**-6) / LIMB_LIMIT
    step = half * x.amax(1, keepdim=True).clamp_min(_LEAST)
    found = step * weight.sum(1) + 2.0**-21 * (x @ weight.t())
    if low:
        other = half * weight.amax(1).clamp_min(_LEAST)
        found += (x + step).sum(1, keepdim=True) * other
    return found if bias is None else found + 2.0**-22 * bias.double().abs()


def _product(limbs: Tensor, packed: Tensor, scale: Tensor, zeros: Tensor) -> Tensor:
    made: Tensor = QLinear(
        limbs, 1.0, 128, packed, scale, zeros, None, 1.0, 0, torch.float32, "none", [0.0], ""
    )
    return made


def check_float32(op: str, x: Tensor) -> None:
    """Refuse activations of other dtypes.

    Raises:
        UnsupportedError: naming the operator and the dtype.
    """
    if x.dtype is not torch.float32:
        raise UnsupportedError(
            f"{op} takes float32 activations, found {x.dtype}",
            fix="lower a float32 model, or leave the linear float",
        )


def limbs_of_rows(x: Tensor, shifts: Tensor) -> tuple[Tensor, Tensor]:
    """The limbs of float32 rows, uint8[2, ..., K] 128 above what they stand for, and their steps.

    Args:
        x: float32[..., K].
        shifts: `limb_shifts` of x's dimensions.
    """
    x = aten.detach.default(x)  # or half a gradient would go by way of the scale
    # Plain calls, each of which oneDNN or Inductor does in one pass; `abs` and `amax` apart are
    # ten times as fast as the norm that gives both.
    step = aten.amax.default(aten.abs.default(x), [-1], True)
    step = aten.mul.Tensor(aten.clamp_min.default(step, _LEAST), 1.0 / LIMB_LIMIT)
    bits = aten.view.dtype(aten.add.Tensor(aten.div.Tensor(x, step), _MAGIC), torch.int32)
    limbs = aten.bitwise_right_shift.Tensor(bits, shifts)
    limbs = aten.to.dtype(limbs, torch.uint8)
    return limbs, step


def join_limbs(sums: Tensor, step: Tensor, bias: Tensor | None) -> Tensor:
    """The result of both limbs' products.

    Args:
        sums: float32[2, ..., N].
        step: of `limbs_of_rows`.
        bias: float32[N] or None.
    """
    low, high = aten.select.int(sums, 0, 0), aten.select.int(sums, 0, 1)
    total = aten.add.Tensor(low, high, alpha=256)
    made: Tensor = (
        aten.mul.Tensor(total, step) if bias is None else aten.addcmul.default(bias, total, step)
    )
    return made


def linear_of_limbs(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    zeros: Tensor,
    shifts: Tensor,
    packed_low: Tensor | None = None,
    scale_low: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """float32 rows times an int8 weight, or one of two limbs; see `LinearOfLimbs`.

    Raises:
        UnsupportedError: the activations are not float32.
    """
    check_float32("linear_of_limbs", x)
    if all(type(size) is int for size in x.shape) and x.numel() == 0:
        return x.new_zeros((*x.shape[:-1], scale.shape[0]))
    limbs, step = limbs_of_rows(x, shifts)
    sums = _product(limbs, packed, scale, zeros)
    if packed_low is not None and scale_low is not None:
        sums = aten.add.Tensor(sums, _product(limbs, packed_low, scale_low, zeros))
    return join_limbs(sums, step, bias)


def linear_of_limbs_at_once(
    x: Tensor, packed: Tensor, scale: Tensor, zeros: Tensor, bias: Tensor | None = None
) -> Tensor:
    """`linear_of_limbs` of one limb of weights, in fewer calls, which no compiler can follow.

    Few rows by a small weight wait for calls more than for products.

    Raises:
        UnsupportedError: the activations are not float32.
    """
    check_float32("linear_of_limbs", x)
    if x.numel() == 0:
        return x.new_zeros((*x.shape[:-1], scale.shape[0]))
    step = x.abs().amax(-1, True).clamp_min_(_LEAST).mul_(1.0 / LIMB_LIMIT)
    bits = torch.div(x.contiguous(), step).add_(_MAGIC)
    if x.numel() <= _FEW:
        # The limbs where they lie, for oneDNN to gather.
        strides = (1, *(4 * stride for stride in bits.stride()))
        limbs = bits.view(torch.uint8).as_strided((2, *x.shape), strides)
    else:
        steps = bits.view(torch.int32)
        limbs = torch.empty((2, *x.shape), dtype=torch.uint8)
        limbs[0].copy_(steps)
        limbs[1].copy_(steps.bitwise_right_shift_(8))
    low, high = _product(limbs, packed, scale, zeros).unbind(0)
    total = torch.add(low, high, alpha=256)
    return total.mul_(step) if bias is None else torch.addcmul(bias, total, step)


_LIBRARY.define(  # type: ignore[no-untyped-call]
    "linear_of_limbs(Tensor x, Tensor packed, Tensor scale, Tensor zeros, Tensor shifts, "
    "Tensor? packed_low=None, Tensor? scale_low=None, Tensor? bias=None) -> Tensor"
)
# Implicit, so that exporters and compilers see the calls it is made of: what they make of a program
# needs nothing of this package.
torch.library.impl(_LIBRARY, "linear_of_limbs", "CompositeImplicitAutograd")(linear_of_limbs)

LinearOfLimbs: Any = torch.ops.pt2e_quant.linear_of_limbs.default
"""y = x @ W.t() + bias with W = integers * scale, within `error_bound` of it.

    x: float32[..., K], K from 1 to 65793; a row with an infinity or a NaN gives none but such.
    packed: `pack_onednn_linear` of int8[N, K].
    scale: float32[N].
    zeros: int32[N] of zeros, which oneDNN wants to see.
    shifts: `limb_shifts` of x's dimensions.
    packed_low, scale_low: of a second limb; W is the sum of both products.
    bias: float32[N].

A 16-bit row keeps 8 bits more than the weights have: what this rounds is far below what quantizing
the weights has. Without VNNI oneDNN's sums saturate: `onednn_is_exact` tells.
"""
