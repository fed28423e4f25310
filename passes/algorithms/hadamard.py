"""Orthogonal matrices that spread outliers over all channels: Hadamard's where there is one."""

import torch
from torch import Tensor


def rotation(size: int, seed: int) -> Tensor:
    """A random orthogonal matrix float64[size, size].

    A Hadamard matrix with random signs, divided by sqrt(size), where Sylvester's doubling or
    Paley's constructions give one; else the orthogonal factor of a random matrix.
    """
    generator = torch.Generator().manual_seed(seed)
    found = hadamard(size)
    if found is None:
        made = torch.randn(size, size, generator=generator, dtype=torch.float64)
        orthogonal: Tensor = torch.linalg.qr(made)[0]
        return orthogonal
    signs = torch.randint(2, (size,), generator=generator).double() * 2 - 1
    scaled: Tensor = found.double() * signs[:, None] / size**0.5
    return scaled


def hadamard(size: int) -> Tensor | None:
    """A matrix of 1 and -1 with orthogonal rows, int8[size, size]; None if no construction fits.

    >>> hadamard(2)
    tensor([[ 1,  1],
            [ 1, -1]], dtype=torch.int8)
    """
    if size == 1:
        return torch.ones(1, 1, dtype=torch.int8)
    if size == 2:
        return torch.tensor([[1, 1], [1, -1]], dtype=torch.int8)
    if size % 4:
        return None
    found = _paley(size)
    if found is not None:
        return found
    half = hadamard(size // 2)
    return None if half is None else torch.kron(torch.tensor([[1, 1], [1, -1]]), half).char()


def _paley(size: int) -> Tensor | None:
    """By the quadratic residues of a prime q: q + 1 = size, or 2 (q + 1) = size (Paley 1933)."""
    if _is_prime(size - 1):
        return _bordered(size - 1, corner=-1) + torch.eye(size, dtype=torch.int8)
    q = size // 2 - 1
    if q % 4 != 1 or not _is_prime(q):
        return None
    symmetric, identity = _bordered(q, corner=1), torch.eye(q + 1, dtype=torch.int8)
    ones = torch.tensor([[1, 1], [1, -1]], dtype=torch.int8)
    rest = torch.tensor([[1, -1], [-1, -1]], dtype=torch.int8)
    return torch.kron(symmetric, ones) + torch.kron(identity, rest)


def _bordered(q: int, corner: int) -> Tensor:
    """Jacobsthal's matrix with a row of 1 above it and a column of `corner` beside it."""
    squares = torch.arange(1, q).square() % q
    character = torch.full((q,), -1, dtype=torch.int8)
    character[squares] = 1
    character[0] = 0
    index = torch.arange(q)
    made = torch.zeros(q + 1, q + 1, dtype=torch.int8)
    made[0, 1:], made[1:, 0] = 1, corner
    made[1:, 1:] = character[(index[:, None] - index) % q]
    return made


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % k for k in range(2, int(number**0.5) + 1))
