"""Decompositions and inverses of small matrices, in steps that every runtime has.

Each step is written out, on whole batches: choices of rows are made by masks. The number of steps
is a size of the matrix, so it is known, and at most `_MOST`.
"""

import math

import torch
from torch import Tensor

from pt2e_quant.passes.functions.rows import known_size

_MOST = 32
"""Steps that are written out: an operator of some ten nodes each."""
_TERMS = 12
"""Terms of the series of an exponential, behind scaling to a norm of 1 / 2."""
_SQUARINGS = 12
"""Squarings of an exponential: enough for norms up to 2048."""


def known_steps(x: Tensor, dim: int = -1, most: int = _MOST) -> int:
    """The size of a dimension.

    Raises:
        NotImplementedError: it is dynamic, or too large to be written out.
    """
    size = known_size(x, dim)
    if x.dtype not in (torch.float32, torch.float64) or not 0 < size <= most:
        raise NotImplementedError(f"real matrices of 1 to {most} rows")
    return size


def _row(x: Tensor, at: int) -> Tensor:
    return x.narrow(-2, at, 1)


def _column(x: Tensor, at: int) -> Tensor:
    return x.narrow(-1, at, 1)


def _places(x: Tensor, dim: int = -2) -> Tensor:
    """0, 1, … along the rows (-2) or columns (-1), to be compared with a place."""
    count = torch.arange(known_size(x, dim))
    return count.unsqueeze(-1) if dim == -2 else count


def _pivot(x: Tensor, at: int) -> tuple[Tensor, Tensor]:
    """X with the greatest of column `at` below the diagonal moved up, and its place [..., 1, 1]."""
    rows, last = _places(x), known_size(x, -2) - 1
    if at == last:
        same = torch.zeros_like(x[..., :1, :1], dtype=torch.int64) + at
        return x, same
    size = torch.where(rows < at, -1.0, _column(x, at).abs())
    found = torch.argmax(size, -2, keepdim=True)
    chosen = torch.where(rows == found, x, 0.0).sum(-2, keepdim=True)
    swapped = torch.where(rows == at, chosen, torch.where(rows == found, _row(x, at), x))
    return swapped, found


def _reduce(x: Tensor, steps: int) -> Tensor:
    """X[..., n, at least n] with the unit matrix in its first columns (Gauss and Jordan)."""
    rows = _places(x)
    for at in range(steps):
        x, _ = _pivot(x, at)
        row = _row(x, at) / _column(_row(x, at), at)
        x = torch.where(rows == at, row, x - _column(x, at) * row)
    return x


def _shared_shape(a: Tensor, b: Tensor) -> list[int]:
    """The batch that two matrices are broadcast to."""
    return list(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]))  # type: ignore[no-untyped-call]


def solve(a: Tensor, b: Tensor) -> Tensor:
    """X of a @ X = b; a is [..., n, n], b [..., n, k]."""
    steps = known_steps(a)
    shape = _shared_shape(a, b)
    both = [a.expand(*shape, *a.shape[-2:]), b.expand(*shape, *b.shape[-2:])]
    found = _reduce(torch.cat(both, -1), steps)
    return found.narrow(-1, steps, found.shape[-1] - steps)


def _none_wrong(a: Tensor) -> Tensor:
    """The status of operators that check nothing: 0 for each matrix."""
    return torch.zeros_like(a[..., 0, 0], dtype=torch.int32)


def solve_ex(
    a: Tensor, b: Tensor, *, left: bool = True, check_errors: bool = False
) -> tuple[Tensor, ...]:
    """X of a @ X = b, or of X @ a = b, and a's factors."""
    is_vector = b.dim() == 1 or (b.dim() == a.dim() - 1 and b.shape == a.shape[:-1])
    if not left:
        a, b = a.mT, b if is_vector else b.mT
    found = solve(a, b.unsqueeze(-1) if is_vector else b)
    found = found.squeeze(-1) if is_vector else found if left else found.mT
    return found, *lu_factor(a)


def inverse_ex(a: Tensor, *, check_errors: bool = False) -> tuple[Tensor, ...]:
    """The inverse; as torch's, without an error where there is none."""
    eye = torch.eye(known_steps(a), dtype=a.dtype)
    return solve(a, eye), _none_wrong(a)


def _turns(pivots: Tensor) -> Tensor:
    """-1 for each pivot that another row gave, 1 for others."""
    places = torch.arange(known_size(pivots, -1)) + 1
    return torch.where(pivots == places, 1.0, -1.0)


def determinant(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The determinant by elimination, with the LU factors and pivots."""
    both, pivots, _ = lu_factor(a)
    each = torch.diagonal(both, dim1=-2, dim2=-1) * _turns(pivots).to(a.dtype)
    return torch.prod(each, -1), both, pivots


def sign_and_log(a: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The determinant's sign, the logarithm of its size, and the factors."""
    both, pivots, _ = lu_factor(a)
    each = torch.diagonal(both, dim1=-2, dim2=-1)
    sign = torch.prod(torch.sign(each) * _turns(pivots).to(a.dtype), -1)
    return sign, torch.log(each.abs()).sum(-1), both, pivots


def _factors(a: Tensor, pivot: bool = True) -> tuple[Tensor, list[Tensor], Tensor]:
    """Both triangles in one matrix, each step's pivot, and the rows that stand at each place."""
    rows, columns = _places(a), _places(a, -1)
    order = rows.expand(*a.shape[:-1], 1)
    swaps: list[Tensor] = []
    for at in range(min(known_steps(a, -2), known_steps(a))):
        if pivot:
            a, found = _pivot(a, at)
            chosen = torch.where(rows == found, order, 0).sum(-2, keepdim=True)
            here = _row(order, at)
            order = torch.where(rows == at, chosen, torch.where(rows == found, here, order))
            swaps.append(found.squeeze(-1))
        factor = _column(a, at) / _column(_row(a, at), at)
        below = torch.where(columns > at, a - factor * _row(a, at), a)
        kept = torch.where(columns == at, factor, below)
        a = torch.where(rows > at, kept, a)
    return a, swaps, order.squeeze(-1)


def lu_factor(
    a: Tensor, *, pivot: bool = True, check_errors: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Both triangles in one matrix, the pivots from 1, and no error."""
    both, swaps, _ = _factors(a, pivot)
    if not pivot:
        raise NotImplementedError("factors without pivots")
    return both, (torch.cat(swaps, -1) + 1).to(torch.int32), _none_wrong(a)


def _triangles(both: Tensor) -> tuple[Tensor, Tensor]:
    """The lower one with ones on its diagonal, and the upper one."""
    rows, columns = known_steps(both, -2), known_steps(both)
    size = min(rows, columns)
    lower = torch.tril(both.narrow(-1, 0, size), -1) + torch.eye(rows, size, dtype=both.dtype)
    return lower, torch.triu(both.narrow(-2, 0, size))


def lu(a: Tensor, *, pivot: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """A = P @ L @ U."""
    if not pivot:
        raise NotImplementedError("factors without pivots")
    both, _, order = _factors(a)
    permuted = (order.unsqueeze(-2) == _places(a)).to(a.dtype)
    return permuted, *_triangles(both)


def _permutation(pivots: Tensor, rows: int) -> Tensor:
    """The rows that stand at each place behind swaps, as [..., rows]."""
    places = torch.arange(rows)
    order = places.expand(*pivots.shape[:-1], rows)
    for at in range(known_size(pivots, -1)):
        found = pivots.narrow(-1, at, 1).to(torch.int64) - 1
        chosen = torch.where(places == found, order, 0).sum(-1, keepdim=True)
        here = order.narrow(-1, at, 1)
        order = torch.where(places == at, chosen, torch.where(places == found, here, order))
    return order


def lu_unpack(
    both: Tensor, pivots: Tensor, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """The permutation and the triangles of `lu_factor`'s result."""
    if not unpack_data or not unpack_pivots:
        raise NotImplementedError("a part of the factors")
    order = _permutation(pivots, known_steps(both, -2))
    permuted = (order.unsqueeze(-2) == _places(both)).to(both.dtype)
    return permuted, *_triangles(both)


def lu_solve(
    both: Tensor, pivots: Tensor, b: Tensor, *, left: bool = True, adjoint: bool = False
) -> Tensor:
    """X of A @ X = b, of A's factors."""
    lower, upper = _triangles(both)
    order = _permutation(pivots, known_steps(both, -2))
    a = (order.unsqueeze(-2) == _places(both)).to(both.dtype) @ lower @ upper
    return solve_ex(a.mT if adjoint else a, b, left=left)[0]


def cholesky(a: Tensor, upper: bool = False) -> Tensor:
    """The lower triangle L of A = L @ L^T, of which A's lower triangle is read; or the upper."""
    columns: list[Tensor] = []
    rest, rows = a.mT if upper else a, _places(a)
    for at in range(known_steps(a)):
        column = _column(rest, at) / torch.sqrt(_column(_row(rest, at), at))
        column = torch.where(rows >= at, column, 0.0)
        columns.append(column)
        rest = rest - column * column.mT
    found = torch.cat(columns, -1)
    return found.mT if upper else found


def cholesky_ex(
    a: Tensor, *, upper: bool = False, check_errors: bool = False
) -> tuple[Tensor, Tensor]:
    """`cholesky`, and no error."""
    return cholesky(a, upper), _none_wrong(a)


def cholesky_solve(b: Tensor, factor: Tensor, upper: bool = False) -> Tensor:
    """X of A @ X = b, of A's triangle."""
    lower = factor.mT if upper else factor
    return solve_triangular(lower.mT, solve_triangular(lower, b, upper=False), upper=True)


def cholesky_inverse(factor: Tensor, upper: bool = False) -> Tensor:
    """A's inverse, of its triangle."""
    return cholesky_solve(torch.eye(known_steps(factor), dtype=factor.dtype), factor, upper)


def solve_triangular(
    a: Tensor, b: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Tensor:
    """X of a @ X = b, row after row; only one triangle of a is read."""
    if not left:
        of_columns = solve_triangular(a.mT, b.mT, upper=not upper, unitriangular=unitriangular)
        return of_columns.mT
    steps = known_steps(a)
    shape = _shared_shape(a, b)
    b = b.expand(*shape, *b.shape[-2:])
    found: dict[int, Tensor] = {}
    for at in range(steps - 1, -1, -1) if upper else range(steps):
        row = _row(b, at)
        for other, value in found.items():
            row = row - _column(_row(a, at), other) * value
        found[at] = row if unitriangular else row / _column(_row(a, at), at)
    return torch.cat([found[at] for at in range(steps)], -2)


def triangular_solve(
    b: Tensor, a: Tensor, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Tensor, Tensor]:
    """`solve_triangular` with its arguments in the older order, and a."""
    read, is_upper = (a.mT, not upper) if transpose else (a, upper)
    return solve_triangular(read, b, upper=is_upper, unitriangular=unitriangular), a


def qr(a: Tensor, mode: str = "reduced") -> tuple[Tensor, Tensor]:
    """QR by Householder reflections, with LAPACK's signs."""
    height, width = known_steps(a, -2), known_steps(a)
    rows, q = _places(a), torch.eye(height, dtype=a.dtype)
    for at in range(min(height - 1, width)):
        below = torch.where(rows >= at, _column(a, at), 0.0)
        first = _row(below, at)
        size = torch.sqrt((below * below).sum(-2, keepdim=True))
        size = torch.where(first < 0, size, -size)
        normal = torch.where(rows == at, below - size, below)
        squares = (normal * normal).sum(-2, keepdim=True)
        twice = torch.where(squares == 0, 0.0, 2.0 / torch.where(squares == 0, 1.0, squares))
        a = a - twice * normal * (normal * a).sum(-2, keepdim=True)
        q = q - twice * (q @ normal) * normal.mT
    q = q.expand(*a.shape[:-2], height, height)
    count = height if mode == "complete" else min(height, width)
    return q.narrow(-1, 0, count), torch.triu(a).narrow(-2, 0, count)


def exponential(a: Tensor) -> Tensor:
    """The matrix exponential, by a series of the scaled matrix, squared again."""
    eye = torch.eye(known_steps(a), dtype=a.dtype)
    norm = a.abs().sum(-2).amax(-1).unsqueeze(-1).unsqueeze(-1)
    halvings = torch.ceil(torch.log2(norm.clamp(min=0.25)) + 1.0).clamp(0.0, float(_SQUARINGS))
    small = a * torch.pow(2.0, -halvings)
    total = eye + small / _TERMS
    for term in range(_TERMS - 1, 0, -1):
        total = eye + (small / term) @ total
    for at in range(_SQUARINGS):
        total = torch.where(halvings > at, total @ total, total)
    return torch.where(norm > 2.0 ** (_SQUARINGS - 1), math.nan, total)


def _added(x: Tensor, product: Tensor, beta: float, alpha: float) -> Tensor:
    scaled = product if alpha == 1 else product * alpha
    if beta == 0:
        return scaled
    return scaled + (x if beta == 1 else x * beta)


def addmv(x: Tensor, rows: Tensor, vec: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """A product of a matrix with a vector, added to another; at `beta` 0 what is NaN in x too."""
    return _added(x, torch.mm(rows, vec.unsqueeze(1)).squeeze(1), beta, alpha)


def addbmm(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """The sum of a batch's products of matrices, added to another."""
    return _added(x, torch.bmm(a, b).sum(0), beta, alpha)
