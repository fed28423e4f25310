"""Functions that ExecuTorch has no kernel for, in terms of operators that it has."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

__all__ = ["FUNCTIONS", "Results"]

Results: TypeAlias = Tensor | tuple[Tensor, ...]
"""What a function gives: one tensor, or the first of several."""


def _polynomial(x: Tensor, *coefficients: float) -> Tensor:
    """By Horner's rule; the coefficient of the highest power first."""
    total = x * coefficients[0] + coefficients[1]
    for coefficient in coefficients[2:]:
        total = total * x + coefficient
    return total


def _signbit(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        return x < 0
    return torch.logical_or(x < 0, torch.logical_and(x == 0, torch.reciprocal(x) < 0))


def _copysign(x: Tensor, y: Tensor) -> Tensor:
    size = x.abs()
    return torch.where(_signbit(y), -size, size)


def _hypot(x: Tensor, y: Tensor) -> Tensor:
    """Scaled by the larger side, so that no square overflows."""
    a, b = x.abs(), y.abs()
    large, small = torch.maximum(a, b), torch.minimum(a, b)
    ratio = small / large.clamp(min=torch.finfo(large.dtype).tiny)
    return large * torch.sqrt(ratio * ratio + 1.0)


def _fmax(x: Tensor, y: Tensor) -> Tensor:
    return torch.where(x.isnan(), y, torch.where(y.isnan(), x, torch.maximum(x, y)))


def _fmin(x: Tensor, y: Tensor) -> Tensor:
    return torch.where(x.isnan(), y, torch.where(y.isnan(), x, torch.minimum(x, y)))


def _dist(x: Tensor, y: Tensor, p: float = 2.0) -> Tensor:
    size = (x - y).abs()
    if p == 0 or math.isinf(p):
        count = (size != 0).to(size.dtype).sum()
        return count if p == 0 else size.amax() if p > 0 else size.amin()
    return torch.pow(torch.pow(size, p).sum(), 1.0 / p)


def _angle(x: Tensor) -> Tensor:
    if x.is_complex():
        raise NotImplementedError("complex numbers")
    return torch.where(x.isnan(), x, (x < 0).to(x.dtype) * math.pi)


def _round(x: Tensor, *, decimals: int) -> Tensor:
    scale = 10.0 ** abs(decimals)
    return torch.round(x * scale) / scale if decimals > 0 else torch.round(x / scale) * scale


def _erfcx(x: Tensor) -> Tensor:
    """exp(x²) erfc(x) to 1.2e-7 of its value (Numerical Recipes, 6.2, erfcc)."""
    z = x.abs()
    t = torch.reciprocal(z * 0.5 + 1.0)
    terms = (0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807, -0.18628806)
    size = t * torch.exp(_polynomial(t, *terms, 0.09678418, 0.37409196, 1.00002368, -1.26551223))
    return torch.where(x < 0, torch.exp(x * x) * 2.0 - size, size)


def _erfc(x: Tensor) -> Tensor:
    size = _erfcx(x.abs()) * torch.exp(-x * x)
    return torch.where(x < 0, -size + 2.0, size)


def _erfinv(x: Tensor) -> Tensor:
    """M. Giles, Approximating the erfinv function (GPU Computing Gems, 2010), single precision."""
    w = -torch.log((-x + 1.0) * (x + 1.0))
    near = (2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087)
    far = (-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773)
    inner = _polynomial(w - 2.5, *near, -0.00125372503, -0.00417768164, 0.246640727, 1.50140941)
    root = torch.sqrt(w.clamp(min=5.0)) - 3.0
    outer = _polynomial(root, *far, -0.0076224613, 0.00943887047, 1.00167406, 2.83297682)
    found = torch.where(w < 5.0, inner, outer) * x
    return torch.where(x.abs() == 1.0, x * math.inf, found)


def _ndtri(x: Tensor) -> Tensor:
    return _erfinv(x * 2.0 - 1.0) * math.sqrt(2.0)


_BESSEL: Mapping[int, tuple[Sequence[float], Sequence[float]]] = {
    0: (
        (0.0045813, 0.0360768, 0.2659732, 1.2067492, 3.0899424, 3.5156229, 1.0),
        (
            *(0.00392377, -0.01647633, 0.02635537, -0.02057706, 0.00916281, -0.00157565),
            *(0.00225319, 0.01328592, 0.39894228),
        ),
    ),
    1: (
        (0.00032411, 0.00301532, 0.02658733, 0.15084934, 0.51498869, 0.87890594, 0.5),
        (
            *(-0.00420059, 0.01787654, -0.02895312, 0.02282967, -0.01031555, 0.00163801),
            *(-0.00362018, -0.03988024, 0.39894228),
        ),
    ),
}
"""Of I0 and I1 / x below 3.75, and beyond (Abramowitz and Stegun, 9.8.1 to 9.8.4)."""


def _scaled_bessel(x: Tensor, order: int) -> Tensor:
    """exp(-|x|) times the modified Bessel function of the first kind, to 3e-7."""
    size, (inner, outer) = x.abs(), _BESSEL[order]
    t = size / 3.75
    near = _polynomial(t * t, *inner) * torch.exp(-size)
    large = size.clamp(min=3.75)
    far = _polynomial(3.75 / large, *outer) * torch.rsqrt(large)
    if order == 0:
        return torch.where(size < 3.75, near, far)
    return torch.where(size < 3.75, near * x, torch.where(x < 0, -far, far))


def _stirling(x: Tensor) -> Tensor:
    """Log Γ of numbers of at least 8."""
    inverse = torch.reciprocal(x)
    series = _polynomial(inverse * inverse, 1 / 1260, -1 / 360, 1 / 12) * inverse
    return (x - 0.5) * torch.log(x) - x + series + 0.5 * math.log(2 * math.pi)


def _lgamma(x: Tensor) -> Tensor:
    """By Stirling's series behind eight steps of Γ(x + 1) = x Γ(x), reflected below 0.5."""
    turned = torch.where(x < 0.5, -x + 1.0, x)
    product = turned
    for step in range(1, 8):
        product = product * (turned + float(step))
    found = _stirling(turned + 8.0) - torch.log(product)
    sine = torch.sin((x - x.floor()) * math.pi)
    reflected = -found - torch.log(sine) + math.log(math.pi)
    return torch.where(x < 0.5, reflected, found)


def _digamma(x: Tensor) -> Tensor:
    """By its asymptotic series behind six steps of ψ(x + 1) = ψ(x) + 1 / x, reflected below 0.5."""
    turned = torch.where(x < 0.5, -x + 1.0, x)
    steps = torch.reciprocal(turned)
    for step in range(1, 6):
        steps = steps + torch.reciprocal(turned + float(step))
    far = turned + 6.0
    inverse = torch.reciprocal(far)
    square = inverse * inverse
    series = _polynomial(square, 1 / 240, -1 / 252, 1 / 120, -1 / 12) * square
    found = torch.log(far) - inverse * 0.5 + series - steps
    angle = (x - x.floor()) * math.pi
    return torch.where(x < 0.5, found - math.pi * torch.cos(angle) / torch.sin(angle), found)


def _known_size(x: Tensor, dim: int) -> int:
    size = x.shape[dim] if x.dim() else 1
    if not isinstance(size, int) or not x.dim():
        raise NotImplementedError("a dynamic size, or none")
    return size


def _sort(x: Tensor, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    values, indices = torch.topk(x, _known_size(x, dim), dim, largest=descending, sorted=True)
    return values, indices


def _kthvalue(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    _known_size(x, dim)
    pair = torch.topk(x, k, dim, largest=False, sorted=True)
    values, indices = (part.narrow(dim, k - 1, 1) for part in pair)
    return (values, indices) if keepdim else (values.squeeze(dim), indices.squeeze(dim))


def _median(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    values, indices = _kthvalue(x, (_known_size(x, dim) + 1) // 2, dim, keepdim)
    if x.is_floating_point():
        values = torch.where(x.isnan().any(dim, keepdim), math.nan, values)
    return values, indices


def _median_of_all(x: Tensor) -> Tensor:
    return _median(x.reshape(-1), 0)[0]


_Combine: TypeAlias = Callable[[Any, Any], Any]


def _scan(parts: Sequence[Tensor], dim: int, combine: _Combine) -> tuple[Tensor, ...]:
    """What stands at each place of a dimension, combined with all before it, by doubling steps."""
    size, step = _known_size(parts[0], dim), 1
    while step < size:
        before = [p.narrow(dim, 0, size - step) for p in parts]
        after = [p.narrow(dim, step, size - step) for p in parts]
        rest = combine(before, after)
        heads = [p.narrow(dim, 0, step) for p in parts]
        parts = [torch.cat(pair, dim) for pair in zip(heads, rest, strict=True)]
        step *= 2
    return tuple(parts)


def _cumprod(x: Tensor, dim: int) -> Tensor:
    return _scan([x], dim, lambda before, after: [before[0] * after[0]])[0]


def _logcumsumexp(x: Tensor, dim: int) -> Tensor:
    def combine(before: Sequence[Tensor], after: Sequence[Tensor]) -> list[Tensor]:
        large, small = torch.maximum(before[0], after[0]), torch.minimum(before[0], after[0])
        gap = torch.where(large == small, 0.0, small - large)  # also of infinities
        return [large + torch.log1p(torch.exp(gap))]

    return _scan([x], dim, combine)[0]


def _extreme(x: Tensor, dim: int, takes: Callable[[Tensor, Tensor], Tensor]) -> Results:
    """The extreme values up to each place, and where the last of each stands."""
    size = _known_size(x, dim)
    shape = [1] * x.dim()
    shape[dim] = size
    places = torch.zeros_like(x, dtype=torch.int64) + torch.arange(size).reshape(shape)

    def combine(before: Sequence[Tensor], after: Sequence[Tensor]) -> list[Tensor]:
        last = takes(after[0], before[0])
        if x.is_floating_point():
            last = torch.logical_or(last, after[0].isnan())
            last = torch.logical_and(last, ~torch.logical_and(before[0].isnan(), ~after[0].isnan()))
        return [torch.where(last, b, a) for a, b in zip(before, after, strict=True)]

    return _scan([x, places], dim, combine)


def _cummax(x: Tensor, dim: int) -> Results:
    return _extreme(x, dim, torch.ge)


def _cummin(x: Tensor, dim: int) -> Results:
    return _extreme(x, dim, torch.le)


def _searchsorted(
    rows: Tensor,
    x: Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:
    """How many of the sorted values are below each value."""
    if sorter is not None:
        raise NotImplementedError("a permutation of the sorted values")
    others = rows if rows.dim() == 1 else rows.unsqueeze(-2)
    value = x.unsqueeze(-1)
    below = others <= value if right or side == "right" else others < value
    return below.to(torch.int64).sum(-1).to(torch.int32 if out_int32 else torch.int64)


def _bucketize(
    x: Tensor, boundaries: Tensor, *, out_int32: bool = False, right: bool = False
) -> Tensor:
    return _searchsorted(boundaries, x, out_int32=out_int32, right=right)


def _shift_left(x: Tensor, places: int) -> Tensor:
    return torch.mul(x, 2**places)


def _shift_right(x: Tensor, places: int) -> Tensor:
    return torch.div(x, 2**places, rounding_mode="floor")


def _adaptive_max_pool2d(x: Tensor, output_size: Sequence[int]) -> tuple[Tensor]:
    """The greatest value of each window; not where it stands."""
    for dim, count in zip((-2, -1), output_size, strict=True):
        size = _known_size(x, dim)
        ends = [(at * size // count, -(-(at + 1) * size // count)) for at in range(count)]
        x = torch.cat([x.narrow(dim, a, b - a).amax(dim, keepdim=True) for a, b in ends], dim)
    return (x,)


FUNCTIONS: Mapping[str, Callable[..., Results]] = {
    "aten.__lshift__.Scalar": _shift_left,
    "aten.__rshift__.Scalar": _shift_right,
    "aten.adaptive_max_pool2d.default": _adaptive_max_pool2d,
    "aten.angle.default": _angle,
    "aten.bucketize.Tensor": _bucketize,
    "aten.copysign.Tensor": _copysign,
    "aten.cummax.default": _cummax,
    "aten.cummin.default": _cummin,
    "aten.cumprod.default": _cumprod,
    "aten.digamma.default": _digamma,
    "aten.dist.default": _dist,
    "aten.erfc.default": _erfc,
    "aten.erfinv.default": _erfinv,
    "aten.exp2.default": lambda x: torch.exp(x * math.log(2.0)),
    "aten.fmax.default": _fmax,
    "aten.fmin.default": _fmin,
    "aten.hypot.default": _hypot,
    "aten.i0.default": lambda x: _scaled_bessel(x, 0) * torch.exp(x.abs()),
    "aten.kthvalue.default": _kthvalue,
    "aten.ldexp.Tensor": lambda x, y: x * torch.pow(2.0, y),
    "aten.lgamma.default": _lgamma,
    "aten.logcumsumexp.default": _logcumsumexp,
    "aten.median.default": _median_of_all,
    "aten.median.dim": _median,
    "aten.round.decimals": _round,
    "aten.searchsorted.Tensor": _searchsorted,
    "aten.signbit.default": _signbit,
    "aten.sort.default": _sort,
    "aten.sort.stable": lambda x, *, stable, dim=-1, descending=False: _sort(x, dim, descending),
    "aten.special_erfcx.default": _erfcx,
    "aten.special_i0e.default": lambda x: _scaled_bessel(x, 0),
    "aten.special_i1.default": lambda x: _scaled_bessel(x, 1) * torch.exp(x.abs()),
    "aten.special_i1e.default": lambda x: _scaled_bessel(x, 1),
    "aten.special_modified_bessel_i0.default": lambda x: _scaled_bessel(x, 0) * torch.exp(x.abs()),
    "aten.special_modified_bessel_i1.default": lambda x: _scaled_bessel(x, 1) * torch.exp(x.abs()),
    "aten.special_ndtri.default": _ndtri,
}
"""By edge operator with its overload."""
