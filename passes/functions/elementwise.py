"""Functions of single elements, in terms of operators that every runtime has."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def _polynomial(x: Tensor, *coefficients: float) -> Tensor:
    """A polynomial by Horner's rule; the coefficient of the highest power first."""
    total = x * coefficients[0] + coefficients[1]
    for coefficient in coefficients[2:]:
        total = total * x + coefficient
    return total


def signbit(x: Tensor) -> Tensor:
    """A mask of negative x, -0.0 included: the reciprocal is negative there."""
    if not x.is_floating_point():
        return x < 0
    return torch.logical_or(x < 0, torch.logical_and(x == 0, torch.reciprocal(x) < 0))


def copysign(x: Tensor, y: Tensor) -> Tensor:
    """|x| with the sign of y."""
    size = x.abs().to(torch.result_type(x, y))
    return torch.where(signbit(y), -size, size)


def atan2(y: Tensor, x: Tensor) -> Tensor:
    """The angle of (x, y), of y's sign."""
    tiny = torch.finfo(x.dtype).tiny
    acute = torch.atan(y.abs() / x.abs().clamp(min=tiny))
    return copysign(torch.where(signbit(x), math.pi - acute, acute), y)


def rrelu(
    x: Tensor,
    lower: float = 0.125,
    upper: float = 1.0 / 3.0,
    training: bool = False,
    generator: object = None,
) -> Tensor:
    """A leaky relu with the mean slope, as in evaluation."""
    if training:
        raise NotImplementedError("slopes that are drawn")
    return torch.nn.functional.leaky_relu(x, (lower + upper) / 2)


def clamp(x: Tensor, min: Any = None, max: Any = None) -> Tensor:
    """Clamp with limits of one type: torch's exporter makes tensors of mixed ones."""
    if {type(min), type(max)} != {int, float} or not x.is_floating_point():
        raise NotImplementedError("limits that are alike")
    return torch.clamp(x, float(min), float(max))


def hypot(x: Tensor, y: Tensor) -> Tensor:
    """Scaled by the larger side, so that no square overflows."""
    a, b = x.abs(), y.abs()
    large, small = torch.maximum(a, b), torch.minimum(a, b)
    ratio = small / large.clamp(min=torch.finfo(large.dtype).tiny)
    return large * torch.sqrt(ratio * ratio + 1.0)


def expm1(x: Tensor) -> Tensor:
    """exp(x) - 1 without the difference, which loses the bits of a small x."""
    return torch.tanh(x / 2.0) * (torch.exp(x) + 1.0)


def elu(x: Tensor, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Tensor:
    """Without the difference of its exponential, which loses the bits of a small x."""
    return torch.where(x > 0, scale * x, scale * alpha * expm1(x.clamp(max=0.0) * input_scale))


def celu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """An elu whose slope is 1 on both sides of 0."""
    return elu(x, alpha, 1.0, 1.0 / alpha)


SELU_ALPHA, SELU_SCALE = 1.6732632423543772, 1.0507009873554805
"""The constants of self-normalizing networks (arXiv 1706.02515)."""


def selu(x: Tensor) -> Tensor:
    """An elu with the constants of self-normalizing networks."""
    return elu(x, SELU_ALPHA, SELU_SCALE)


def log_softmax_of_float64(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """log_softmax of float64, which ExecuTorch has no kernel for."""
    if x.dtype is not torch.float64:
        raise NotImplementedError("a dtype that runtimes take")
    moved = x - x.amax(dim, keepdim=True)
    return moved - torch.log(torch.exp(moved).sum(dim, keepdim=True))


def log_sigmoid(x: Tensor) -> Tensor:
    """Without the sigmoid, whose small values vanish: that of -200 is -200."""
    return x.clamp(max=0.0) - torch.log1p(torch.exp(-x.abs()))


def logaddexp(x: Tensor, y: Tensor) -> Tensor:
    """The larger one and a little more, so that no exponential overflows."""
    large = torch.maximum(x, y)
    gap = torch.where(x == y, 0.0, (x - y).abs())  # also of infinities
    return large + torch.log1p(torch.exp(-gap))


def logaddexp2(x: Tensor, y: Tensor) -> Tensor:
    """`logaddexp` to the base 2."""
    of_two = math.log(2.0)
    return logaddexp(x * of_two, y * of_two) / of_two


def log_ndtr(x: Tensor) -> Tensor:
    """The logarithm of the normal distribution's area below x."""
    root = math.sqrt(0.5)
    low = x.clamp(max=-1.0)
    below = torch.log(erfcx(-low * root) / 2.0) - low * low / 2.0
    return torch.where(x < -1.0, below, torch.log1p(-erfc(x.clamp(min=-1.0) * root) / 2.0))


def binary_cross_entropy_with_logits(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: int = 1,
) -> Tensor:
    """The loss of each element, their mean (1) or sum (2)."""
    positive = log_sigmoid(x) * target
    if pos_weight is not None:
        positive = positive * pos_weight
    loss = -(positive + log_sigmoid(-x) * (1.0 - target))
    if weight is not None:
        loss = loss * weight
    return loss if reduction == 0 else loss.mean() if reduction == 1 else loss.sum()


def fmax(x: Tensor, y: Tensor) -> Tensor:
    """The larger one, or the other of a NaN."""
    if not x.is_floating_point() and not y.is_floating_point():
        return torch.maximum(x, y)
    return torch.where(x.isnan(), y, torch.where(y.isnan(), x, torch.maximum(x, y)))


def fmin(x: Tensor, y: Tensor) -> Tensor:
    """The smaller one, or the other of a NaN."""
    if not x.is_floating_point() and not y.is_floating_point():
        return torch.minimum(x, y)
    return torch.where(x.isnan(), y, torch.where(y.isnan(), x, torch.minimum(x, y)))


def dist(x: Tensor, y: Tensor, p: float = 2.0) -> Tensor:
    """The p-norm of x - y."""
    size = (x - y).abs()
    if p == 0 or math.isinf(p):
        count = (size != 0).to(size.dtype).sum()
        return count if p == 0 else size.amax() if p > 0 else size.amin()
    return torch.pow(torch.pow(size, p).sum(), 1.0 / p)


def angle(x: Tensor) -> Tensor:
    """0 or pi, of real numbers."""
    if x.is_complex():
        raise NotImplementedError("complex numbers")
    return torch.where(x.isnan(), x, (x < 0).to(x.dtype) * math.pi)


def round_decimals(x: Tensor, *, decimals: int) -> Tensor:
    """Round to `decimals` places behind the point; negative ones are before it."""
    scale = 10.0 ** abs(decimals)
    return torch.round(x * scale) / scale if decimals > 0 else torch.round(x / scale) * scale


def erfcx(x: Tensor) -> Tensor:
    """exp(x²) erfc(x) to 1.2e-7 of its value (Numerical Recipes, 6.2, erfcc)."""
    z = x.abs()
    t = torch.reciprocal(z * 0.5 + 1.0)
    terms = (0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807, -0.18628806)
    size = t * torch.exp(_polynomial(t, *terms, 0.09678418, 0.37409196, 1.00002368, -1.26551223))
    return torch.where(x < 0, torch.exp(x * x) * 2.0 - size, size)


def erfc(x: Tensor) -> Tensor:
    """1 - erf(x), without cancellation."""
    size = erfcx(x.abs()) * torch.exp(-x * x)
    return torch.where(x < 0, -size + 2.0, size)


def erfinv(x: Tensor) -> Tensor:
    """M. Giles, Approximating the erfinv function (GPU Computing Gems, 2010), single precision."""
    w = -torch.log((-x + 1.0) * (x + 1.0))
    near = (2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087)
    far = (-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773)
    inner = _polynomial(w - 2.5, *near, -0.00125372503, -0.00417768164, 0.246640727, 1.50140941)
    root = torch.sqrt(w.clamp(min=5.0)) - 3.0
    outer = _polynomial(root, *far, -0.0076224613, 0.00943887047, 1.00167406, 2.83297682)
    found = torch.where(w < 5.0, inner, outer) * x
    return torch.where(x.abs() == 1.0, x * math.inf, found)


def ndtri(x: Tensor) -> Tensor:
    """The inverse of the normal distribution function."""
    return erfinv(x * 2.0 - 1.0) * math.sqrt(2.0)


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
"""Coefficients of I0 and I1 / x below 3.75, and beyond (Abramowitz and Stegun, 9.8.1 to 9.8.4)."""


def scaled_bessel(x: Tensor, order: int) -> Tensor:
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


def lgamma(x: Tensor) -> Tensor:
    """Log |Γ(x)| by Stirling's series, behind eight steps Γ(x + 1) = x Γ(x); x < 0.5 reflected."""
    turned = torch.where(x < 0.5, -x + 1.0, x)
    product = turned
    for step in range(1, 8):
        product = product * (turned + float(step))
    found = _stirling(turned + 8.0) - torch.log(product)
    sine = torch.sin((x - x.floor()) * math.pi)
    reflected = -found - torch.log(sine) + math.log(math.pi)
    return torch.where(x < 0.5, reflected, found)


def mvlgamma(x: Tensor, p: int) -> Tensor:
    """Log Γ_p(x): a sum of p functions of one variable."""
    total = sum((lgamma(x - 0.5 * at) for at in range(1, p)), lgamma(x))
    return total + p * (p - 1) / 4 * math.log(math.pi)


def digamma(x: Tensor) -> Tensor:
    """ψ(x) by an asymptotic series, behind six steps ψ(x + 1) = ψ(x) + 1/x; x < 0.5 reflected."""
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


def shift_left(x: Tensor, places: int) -> Tensor:
    """X times a power of 2; products wrap, as the bits that are shifted out."""
    if isinstance(places, int):
        return torch.mul(x, 2**places)
    return x * _whole_power(torch.full_like(x, 2), places)


def shift_right(x: Tensor, places: int) -> Tensor:
    """X over a power of 2, rounded down."""
    if not isinstance(places, int):
        return torch.bitwise_right_shift(x, torch.scalar_tensor(places, dtype=x.dtype))
    return torch.div(x, 2**places, rounding_mode="floor")


def power(x: Tensor, exponent: Any) -> Tensor:
    """A power of booleans, or with a dynamic size; runtimes take others with numbers."""
    is_number = isinstance(exponent, (int, float))
    if x.dtype is torch.bool:
        x = x.to(torch.result_type(x, exponent))
    elif is_number:
        raise NotImplementedError("a number, which runtimes take")
    if is_number:
        return torch.pow(x, exponent)
    if x.is_floating_point():
        return torch.pow(x, torch.scalar_tensor(exponent, dtype=x.dtype))
    return _whole_power(x, exponent)


def _whole_power(x: Tensor, exponent: torch.SymInt) -> Tensor:
    """Integers to a power, by squaring: products wrap as torch's; runtimes compute it in floats."""
    node = exponent.node
    most = node.shape_env.bound_sympy(node.expr).upper
    found, square = torch.ones_like(x), x
    for place in range(int(most).bit_length() if most < 2**31 else 31):
        has_bit = torch.scalar_tensor(exponent // 2**place % 2, dtype=torch.int64) == 1
        found = torch.where(has_bit, found * square, found)
        square = square * square
    return found


def floor_quotient(x: Any, y: Any) -> Tensor:
    """Floor division of booleans, which count as 0 and 1, and by a number that is not whole."""
    dtype = torch.result_type(x, y)
    if isinstance(x, Tensor) and isinstance(y, float):
        return torch.div(x.to(dtype), y, rounding_mode="floor")
    if not isinstance(x, Tensor) or x.dtype is not torch.bool:
        raise NotImplementedError("not of booleans")
    return torch.floor_divide(x.to(dtype), y)


def truth_of_bytes(reduce: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`any` or `all` of uint8, which torch gives as uint8 and runtimes as booleans."""

    def call(x: Tensor, *args: Any) -> Tensor:
        if x.dtype is not torch.uint8:
            raise NotImplementedError("not of bytes")
        return reduce(x != 0, *args).to(torch.uint8)

    return call


def add_product(x: Tensor, y: Tensor, z: Tensor, *, value: Any = 1) -> Tensor:
    """Addcmul by a dynamic size; runtimes take it by a number."""
    if isinstance(value, (int, float)):
        raise NotImplementedError("a number, which runtimes take")
    return x + y * z * torch.scalar_tensor(value, dtype=x.dtype)


def remainder(x: Any, y: Any) -> Tensor:
    """The remainder of integers, with the divisor's sign: ExecuTorch's has the dividend's.

    Of a number and a tensor it has none.
    """
    tensor, dtype = x if isinstance(x, Tensor) else y, torch.result_type(x, y)
    if dtype.is_floating_point and not isinstance(x, Tensor):
        return torch.remainder(torch.scalar_tensor(x, dtype=dtype), y.to(dtype))
    if dtype.is_floating_point or tensor.dtype == torch.bool:
        raise NotImplementedError("not of integers")
    if not isinstance(x, Tensor):
        x = torch.scalar_tensor(x, dtype=y.dtype)
    found: Tensor = x - torch.div(x, y, rounding_mode="floor") * y
    return found


def empty_permuted(size: Sequence[int], physical_layout: Sequence[int], **options: Any) -> Tensor:
    """A tensor to be written, of zeros. torch makes one in losses made of other operators."""
    if list(physical_layout) != sorted(physical_layout):
        raise NotImplementedError("another layout")
    return torch.full(size, 0, dtype=options.get("dtype"))


def soft_margin_loss(x: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    """The logarithm of 1 + exp(-x * target), also where that is little."""
    loss = torch.log1p(torch.exp(-x * target))
    return loss if reduction == 0 else loss.mean() if reduction == 1 else loss.sum()


def masked_select(x: Tensor, mask: Tensor) -> Tensor:
    """The values under a mask, as what an index of booleans gives."""
    x, mask = torch.broadcast_tensors(x, mask)  # type: ignore[no-untyped-call]  # torch's
    # An index of no dimension gives values at a dimension of its own.
    x, mask = x.reshape(x.shape or (1,)), mask.reshape(mask.shape or (1,))
    return x[mask]
