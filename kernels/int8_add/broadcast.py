"""Strides to read two tensors of different shapes or layouts in the order of a third's memory."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pt2e_quant.core.errors import InputError

_DIMS = 3


@dataclass(frozen=True, slots=True)
class Reading:
    """The places of elements that are read in the order of the result's memory.

    Args:
        tensor: what is read; a copy where three strides cannot say it.
        strides: in elements, along the three sizes of the walk; 0 where it is broadcast.
        is_flat: it lies as the result does.
    """

    tensor: Tensor
    strides: tuple[int, int, int]
    is_flat: bool


def result_like(x: Tensor, y: Tensor) -> Tensor:
    """The operand whose shape and strides the result takes; x where both have its shape.

    Raises:
        InputError: the shapes do not broadcast.
    """
    try:
        shape = torch.broadcast_shapes(x.shape, y.shape)  # type: ignore[no-untyped-call]  # torch's own
    except RuntimeError as error:
        raise InputError(f"int8_add has no sum of {tuple(x.shape)} and {tuple(y.shape)}") from error
    if x.shape == shape:
        return x
    return y if y.shape == shape else x.expand(shape)


def walk_together(
    out: Tensor, operands: Sequence[Tensor]
) -> tuple[tuple[int, int, int], tuple[Reading, ...]]:
    """Three sizes whose product is out's, slowest first in its memory, and how operands are read.

    Args:
        out: dense in memory.
        operands: tensors that broadcast to its shape.
    """
    steps: tuple[int, ...] = out.stride()
    order = sorted(range(out.dim()), key=lambda i: (-steps[i], -out.shape[i]))
    views = [t.expand(out.shape).permute(order) for t in operands]
    target = out.permute(order)
    sizes, strides = _merge(target, views)
    if len(sizes) > _DIMS:
        # Rare (a mask broadcast along two separate axes, two memory formats): one is laid out.
        views = [v if _is_flat(v, target) else v.contiguous() for v in views]
        sizes, strides = _merge(target, views)
    missing = _DIMS - len(sizes)
    padded = (*(1,) * missing, *sizes)
    readings = tuple(
        Reading(
            tensor=view,
            strides=(*(0,) * missing, *steps),  # type: ignore[arg-type]  # three in all
            is_flat=_is_flat(view, target),
        )
        for view, steps in zip(views, strides, strict=True)
    )
    return padded, readings  # type: ignore[return-value]  # three in all


def _is_flat(view: Tensor, target: Tensor) -> bool:
    pairs = zip(view.shape, view.stride(), target.stride(), strict=True)
    return all(size == 1 or mine == its for size, mine, its in pairs)


def _merge(target: Tensor, views: Sequence[Tensor]) -> tuple[list[int], list[list[int]]]:
    """Sizes and strides with neighbours joined where every operand walks through both as one."""
    sizes: list[int] = []
    strides: list[list[int]] = [[] for _ in views]
    for axis, size in enumerate(target.shape):
        if size == 1:
            continue
        steps = [view.stride(axis) for view in views]
        if sizes and all(
            held[-1] == step * size for held, step in zip(strides, steps, strict=True)
        ):
            sizes[-1] *= size
            for held, step in zip(strides, steps, strict=True):
                held[-1] = step
            continue
        sizes.append(size)
        for held, step in zip(strides, steps, strict=True):
            held.append(step)
    return sizes, strides
