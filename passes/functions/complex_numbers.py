"""Functions of complex numbers, in terms of their real and imaginary parts."""

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from pt2e_quant.passes.functions.rows import known_size

Pair: TypeAlias = tuple[Any, Any]
"""The real and the imaginary part; one of them may be None, which stands for zeros."""


class Complex(tuple[Any, ...]):
    """The real and the imaginary part of a tensor; a leaf for torch's pytrees."""


def _pair(value: Any) -> Pair:
    if isinstance(value, Complex):
        return value[0], value[1]
    return (value.real, value.imag) if isinstance(value, complex) else (value, None)


def _full(pair: Pair) -> Complex:
    re, im = pair
    like = im if re is None else re
    filled = [torch.zeros_like(like) if part is None else part for part in (re, im)]
    if filled[0].shape != filled[1].shape:
        filled = [p + torch.zeros_like(q) for p, q in (filled, reversed(filled))]
    return Complex(filled)


def _sum(left: Any, right: Any) -> Any:
    if left is None or right is None:
        return left if right is None else right
    return left + right


def _negative(x: Any) -> Any:
    return None if x is None else -x


def add(x: Any, y: Any, *, alpha: float = 1) -> Complex:
    """X plus alpha times y."""
    scaled = (None if q is None else q * alpha for q in _pair(y))
    re, im = (_sum(p, q) for p, q in zip(_pair(x), scaled, strict=True))
    return _full((re, im))


def subtract(x: Any, y: Any, *, alpha: float = 1) -> Complex:
    """X minus alpha times y."""
    return add(x, y, alpha=-alpha)


def multiply(x: Any, y: Any, product: Callable[[Any, Any], Any] = operator.mul) -> Complex:
    """X times y, or another product that is linear in both."""
    (a, b), (c, d) = _pair(x), _pair(y)

    def times(p: Any, q: Any) -> Any:
        return None if p is None or q is None else product(p, q)

    return _full((_sum(times(a, c), _negative(times(b, d))), _sum(times(a, d), times(b, c))))


def divide(x: Any, y: Any) -> Complex:
    """X by y."""
    c, d = _pair(y)
    if d is None:
        return multiply(x, 1.0 / c)
    re, im = multiply(x, Complex((c, -d)) if isinstance(c, Tensor) else complex(c, -d))
    length = c * c + d * d
    return Complex((re / length, im / length))


def power(x: Complex, exponent: float) -> Complex:
    """A small whole power."""
    if exponent not in (1, 2, 3):
        raise NotImplementedError("a power that is no product")
    result = x
    for _ in range(int(exponent) - 1):
        result = multiply(result, x)
    return result


def magnitude(x: Complex) -> Tensor:
    """The lengths."""
    return torch.sqrt(x[0] * x[0] + x[1] * x[1])


def polar(length: Tensor, angle: Tensor) -> Complex:
    """Complex numbers from absolute values and angles in radians."""
    return Complex((length * torch.cos(angle), length * torch.sin(angle)))


def einsum(equation: str, operands: Sequence[Any], *, path: Any = None) -> Complex:
    """A product of one or two operands."""
    if len(operands) == 1:
        return Complex(torch.einsum(equation, [part]) for part in _full(_pair(operands[0])))
    if len(operands) > 2:
        raise NotImplementedError("a product of more than two")
    left, right = operands
    return multiply(left, right, lambda p, q: torch.einsum(equation, [p, q]))


def choose(condition: Tensor, x: Any, y: Any) -> Complex:
    """X where a condition holds, else y."""
    pairs = zip(_pair(x), _pair(y), strict=True)
    terms = ((0.0 if term is None else term for term in pair) for pair in pairs)
    return Complex(torch.where(condition, *pair) for pair in terms)


def of_parts(target: Any) -> Callable[..., Any]:
    """A function that moves or sums elements, applied to the real and the imaginary parts."""

    def function(*args: Any, **kwargs: Any) -> Any:
        def one(index: int) -> Any:
            def part(value: Complex) -> Any:
                return value[index]

            taken = tree_map_only(Complex, part, (args, kwargs))
            return target(*taken[0], **taken[1])

        re, im = one(0), one(1)
        if isinstance(re, Tensor):
            return Complex((re, im))
        return [Complex(parts) for parts in zip(re, im, strict=True)]

    return function


def _resized(part: Tensor, size: int) -> Tensor:
    """Cut, or filled up with zeros, at the end of the last dimension."""
    given = known_size(part, -1)
    if given >= size:
        return part.narrow(-1, 0, size) if given > size else part
    return torch.constant_pad_nd(part, [0, size - given])


def _half(x: Tensor) -> Complex:
    """The first half of the spectrum of real rows: the transform that runtimes have."""
    return Complex(torch.view_as_real(torch.fft.rfft(x.contiguous())).unbind(-1))


def _completed(half: Complex, size: int) -> Complex:
    """All of a spectrum whose other half is the conjugate of the first, in reverse."""
    behind = (size - 1) // 2
    if not behind:
        return half
    re, im = (part.narrow(-1, 1, behind).flip([-1]) for part in half)
    return Complex((torch.cat([half[0], re], -1), torch.cat([half[1], -im], -1)))


def _spectrum(x: Tensor) -> Complex:
    return _completed(_half(x), known_size(x, -1))


def _scaled(x: Complex, size: int, norm: str | None, *, is_inverse: bool) -> Complex:
    factor = size**-0.5 if norm == "ortho" else 1.0 / size
    if norm != "ortho" and (norm == "forward") == is_inverse:
        return x
    return Complex((x[0] * factor, x[1] * factor))


def _along_last(
    function: Callable[[Complex, int | None, str | None], Complex | Tensor],
    x: Any,
    n: int | None = None,
    dim: int = -1,
    norm: str | None = None,
) -> Any:
    """A transform of rows along another dimension."""
    found = function(Complex(part.movedim(dim, -1) for part in _full(_pair(x))), n, norm)
    if isinstance(found, Tensor):
        return found.movedim(-1, dim)
    return Complex(part.movedim(-1, dim) for part in found)


def _fft(x: Complex, n: int | None, norm: str | None) -> Complex:
    size = n or known_size(x[0], -1)
    (a, b), (c, d) = (_spectrum(_resized(part, size)) for part in x)
    return _scaled(Complex((a - d, b + c)), size, norm, is_inverse=False)


def _ifft(x: Complex, n: int | None, norm: str | None) -> Complex:
    """The conjugate of the transform of the conjugate."""
    size = n or known_size(x[0], -1)
    (a, b), (c, d) = (_spectrum(_resized(part, size)) for part in x)
    return _scaled(Complex((a + d, c - b)), size, norm, is_inverse=True)


def _rfft(x: Complex, n: int | None, norm: str | None) -> Complex:
    size = n or known_size(x[0], -1)
    return _scaled(_half(_resized(x[0], size)), size, norm, is_inverse=False)


def _irfft(x: Complex, n: int | None, norm: str | None) -> Any:
    """The real part of the inverse of the completed spectrum."""
    size = n or 2 * (known_size(x[0], -1) - 1)
    half = Complex(_resized(part, size // 2 + 1) for part in x)
    return _ifft(_completed(half, size), size, norm)[0]


def _of_axes(
    last: Callable[..., Any],
    others: Callable[..., Any],
    default: Sequence[int] | None,
    x: Any,
    s: Sequence[int] | None = None,
    dim: Sequence[int] | None = None,
    norm: str | None = None,
    *,
    begins_last: bool,
) -> Any:
    """A transform along several axes, one after the other."""
    axes = dim or default or range(-(_pair(x)[0].dim() if s is None else len(s)), 0)
    sizes = [None if s is None or s[i] == -1 else s[i] for i in range(len(axes))]
    steps = [(others, n, axis) for n, axis in zip(sizes, axes, strict=True)]
    steps[-1] = (last, *steps[-1][1:])
    for step, n, axis in reversed(steps) if begins_last else steps:
        x = _along_last(step, x, n, axis, norm)
    return x


def _transforms() -> Mapping[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {}
    kinds: Mapping[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "fft": (_fft, _fft),
        "ifft": (_ifft, _ifft),
        "rfft": (_rfft, _fft),
        "irfft": (_irfft, _ifft),
    }
    for name, (last, others) in kinds.items():
        found[f"fft_{name}"] = partial(_along_last, last)
        several = partial(_of_axes, last, others, begins_last=name != "irfft")
        found[f"fft_{name}n"] = partial(several, None)
        found[f"fft_{name}2"] = partial(several, (-2, -1))
    return found


PRODUCTS = ("matmul", "bmm", "mm", "outer")
MOVES = (
    *(
        "_unsafe_view",
        "alias",
        "broadcast_to",
        "cat",
        "chunk",
        "clone",
        "concat",
        "constant_pad_nd",
    ),
    *("contiguous", "cumsum", "detach", "diagonal", "expand", "fft_fftshift", "fft_ifftshift"),
    *("flatten", "flip", "gather", "index", "index_select", "mean", "movedim", "narrow", "neg"),
    *("pad", "permute", "repeat", "repeat_interleave", "reshape", "roll", "select", "slice"),
    *("slice_scatter", "split", "split_with_sizes", "squeeze", "stack", "sum", "swapaxes", "t"),
    *("transpose", "tril", "triu", "unbind", "unflatten", "unfold", "unsqueeze", "view", "numpy_T"),
)
"""Operators that do the same to each part."""

FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "abs": magnitude,
    "add": add,
    "angle": lambda x: torch.atan2(x[1], x[0]),
    "complex": lambda re, im: Complex((re, im)),
    "conj": lambda x: Complex((x[0], -x[1])),
    "_conj": lambda x: Complex((x[0], -x[1])),
    "conj_physical": lambda x: Complex((x[0], -x[1])),
    "div": divide,
    "einsum": einsum,
    "exp": lambda x: polar(torch.exp(x[0]), x[1]),
    "imag": lambda x: x[1],
    "mul": multiply,
    "polar": polar,
    "pow": power,
    "real": lambda x: x[0],
    "reciprocal": lambda x: divide(1.0, x),
    "resolve_conj": lambda x: x,
    "rsub": lambda x, y, alpha=1: subtract(y, multiply(x, alpha)),
    "stft": lambda *args: Complex(torch.view_as_real(torch.ops.aten.stft(*args)).unbind(-1)),
    "square": lambda x: multiply(x, x),
    "sub": subtract,
    "view_as_complex": lambda x: Complex(x.unbind(-1)),
    "view_as_real": lambda x: torch.stack(list(x), -1),
    "where": choose,
    **{name: partial(multiply, product=getattr(torch, name)) for name in PRODUCTS},
    **_transforms(),
}
"""Every function, by the name of the ATen operator, whatever its overload."""
