"""Decompositions of small matrices into vectors, by rotations of pairs of rows and columns.

Pairs that share no place are rotated together (Golub and Van Loan, Matrix Computations, 8.5): a
sweep is as many rounds as there are columns. The signs of vectors may be others than LAPACK's.
"""

from typing import Any

import torch
from torch import Tensor

from pt2e_quant.passes.functions.matrices import known_steps, qr
from pt2e_quant.passes.functions.rows import known_size

_MOST_ROUNDS = 8
"""Columns that are rotated against each other: as many rounds in each sweep."""
_SWEEPS = 7


class _Round:
    """Pairs of places that share no place.

    Args:
        size: the number of places.
        at: the round; of as many, or one less if that is odd, every pair is in one.
        dtype: of the matrices.
    """

    def __init__(self, size: int, at: int, dtype: torch.dtype) -> None:
        odd = size - 1 + size % 2
        place = torch.arange(size)
        partner = torch.remainder(at + odd - place, odd)
        if size % 2 == 0:
            last = size - 1
            partner = torch.where(place == last, at * (odd + 1) // 2 % odd, partner)
            partner = torch.where(partner == place, last, partner)
        self.swap = (partner.unsqueeze(-1) == place).to(dtype)
        self.turned = torch.sign(partner - place).to(dtype)

    def rotation(self, diagonal: Tensor, products: Tensor) -> Tensor:
        """The matrix that makes the pairs' products 0 (Golub and Van Loan, 8.4).

        Args:
            diagonal: [..., n], a_pp.
            products: [..., n, n], of which a_pq are read.
        """
        mixed = (products * self.swap).sum(-1) * self.turned.abs() * 2.0
        other = (diagonal.unsqueeze(-2) * self.swap).sum(-1)
        # Of both of a pair alike.
        gap = (other - diagonal) * self.turned
        size = gap.abs() + torch.sqrt(gap * gap + mixed * mixed)
        tangent = torch.where(gap < 0, -mixed, mixed) / size.clamp(min=1e-30)
        cosine = torch.rsqrt(tangent * tangent + 1.0)
        sine = tangent * cosine * self.turned
        eye = torch.eye(known_size(diagonal, -1), dtype=diagonal.dtype)
        return eye * cosine.unsqueeze(-1) + self.swap * sine.unsqueeze(-1)


def _rounds(size: int, dtype: torch.dtype) -> list[_Round]:
    return [_Round(size, at, dtype) for at in range(size - 1 + size % 2 if size > 1 else 0)]


def _scale(a: Tensor) -> Tensor:
    """The greatest size, so that no product of what is divided by it overflows."""
    greatest = a.abs().amax((-2, -1), keepdim=True)
    return torch.where(greatest == 0, 1.0, greatest)


def _ordered(values: Tensor, vectors: Tensor, largest: bool) -> tuple[Tensor, Tensor]:
    size = known_size(values, -1)
    found, places = torch.topk(values, size, -1, largest=largest, sorted=True)
    return found, vectors.gather(-1, places.unsqueeze(-2).expand_as(vectors))


def eigh(a: Tensor, uplo: str = "L", compute_v: bool = True) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of symmetric matrices, by Jacobi's rotations."""
    size = known_steps(a, most=_MOST_ROUNDS)
    lower = torch.tril(a if uplo == "L" else a.mT)
    eye, scale = torch.eye(size, dtype=a.dtype), _scale(lower)
    x = (lower + torch.tril(lower, -1).mT) / scale
    vectors, rounds = eye.expand_as(x), _rounds(size, a.dtype)
    for one in rounds * _SWEEPS:
        turn = one.rotation((x * eye).sum(-1), x)
        x, vectors = turn.mT @ x @ turn, vectors @ turn
    return _ordered((x * eye).sum(-1) * scale.squeeze(-1), vectors, largest=False)


def svd(
    a: Tensor, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Singular values and vectors by one-sided rotations; vectors are 0 where a value is 0."""
    is_wide, scale = known_steps(a, -2) < known_steps(a), _scale(a)
    x = (a.mT if is_wide else a) / scale
    size = known_steps(x, most=_MOST_ROUNDS)
    right = torch.eye(size, dtype=a.dtype).expand(*x.shape[:-2], size, size)
    for one in _rounds(size, a.dtype) * _SWEEPS:
        turn = one.rotation((x * x).sum(-2), x.mT @ x)
        x, right = x @ turn, right @ turn
    sizes = torch.sqrt((x * x).sum(-2))
    values, right = _ordered(sizes, right, largest=True)
    _, x = _ordered(sizes, x, largest=True)
    left = x / values.clamp(min=1e-30).unsqueeze(-2)
    if full_matrices and known_size(x, -2) > size:
        whole = qr(left, "complete")[0]
        left = torch.cat([left, whole.narrow(-1, size, known_size(x, -2) - size)], -1)
    values = values * scale.squeeze(-1)
    return (right, values, left.mT) if is_wide else (left, values, right.mT)


def pinv(a: Tensor, *, atol: Any = None, rtol: Any = None, hermitian: bool = False) -> Tensor:
    """The pseudo-inverse, without what is at most max(atol, rtol times the greatest)."""
    if hermitian:
        values, left = eigh(a)
        right = left
    else:
        left, values, transposed = svd(a)
        right = transposed.mT
    if rtol is None:
        is_given = atol is not None and not isinstance(atol, Tensor) and atol > 0
        rtol = 0.0 if is_given else torch.finfo(a.dtype).eps * max(a.shape[-2:])
        if isinstance(atol, Tensor):
            rtol = torch.where(atol > 0, 0.0, rtol)
    size = values.abs()
    least = _wide(rtol) * size.amax(-1, keepdim=True)
    least = least if atol is None else torch.maximum(least, _wide(atol) + torch.zeros_like(least))
    kept = size > least
    inverse = torch.where(kept, 1.0 / torch.where(kept, values, 1.0), 0.0)
    return (right * inverse.unsqueeze(-2)) @ left.mT


def _wide(value: Any) -> Any:
    return value.unsqueeze(-1) if isinstance(value, Tensor) else value
