"""The right matrix that each left matrix is multiplied with."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from pt2e_quant.core.errors import InputError


@dataclass(frozen=True, slots=True)
class Batches:
    """Leading axes of a product, broadcast.

    Args:
        shape: of the result, without its last two sizes.
        repeats: how many matrices in a row of the last leading axis share one right matrix.
    """

    shape: tuple[int, ...]
    repeats: int

    @property
    def count(self) -> int:
        """Matrices of the result."""
        return math.prod(self.shape)

    def left_views(self, left: Tensor) -> Tensor:
        """Left matrices with two leading axes, by strides alone where they have no more."""
        return _two_axes(left.expand(*self.shape, *left.shape[-2:]))

    def right_views(self, right: Tensor) -> Tensor:
        """Right matrices likewise; their second axis is shorter by `repeats`."""
        shape = self.shape
        if self.repeats > 1:
            shape = (*shape[:-1], shape[-1] // self.repeats)
        return _two_axes(right.expand(*shape, *right.shape[-2:]))


def _two_axes(matrices: Tensor) -> Tensor:
    while matrices.dim() < 4:
        matrices = matrices.unsqueeze(0)
    return matrices if matrices.dim() == 4 else matrices.flatten(0, -4)


def read_batches(left: Sequence[int], right: Sequence[int]) -> Batches:
    """The leading axes of a product of two shapes; sizes may be symbolic.

    They broadcast as in `torch.matmul`. Besides, the last leading axis of right may be a divisor
    of left's: heads that share keys and values.

    Args:
        left: [..., M, K].
        right: [..., K, N].

    Raises:
        InputError: the shapes do not go together.
    """
    if len(left) < 2 or len(right) < 2 or left[-1] != right[-2]:
        raise InputError(f"int8_matmul has no product of {list(left)} and {list(right)}")
    rank = max(len(left), len(right)) - 2
    a = (*(1,) * (rank + 2 - len(left)), *left[:-2])
    b = (*(1,) * (rank + 2 - len(right)), *right[:-2])
    shape, repeats = [], 1
    for axis, (of_left, of_right) in enumerate(zip(a, b, strict=True)):
        if of_left == of_right or of_right == 1:
            shape.append(of_left)
        elif of_left == 1:
            shape.append(of_right)
        elif axis == rank - 1 and of_right > 0 and of_left % of_right == 0:
            shape.append(of_left)
            repeats = of_left // of_right
        else:
            raise InputError(f"int8_matmul has no product of {list(left)} and {list(right)}")
    return Batches(tuple(shape), repeats)
