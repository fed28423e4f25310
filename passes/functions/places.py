"""Writes to places of a tensor, as choices, and as writes to rows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pt2e_quant.passes.functions.sizes_of_run_time import scatter_reduce


def diagonal_scatter(
    x: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Tensor:
    """As a choice between the diagonal, spread over rows, and what stands beside it."""
    if not src.numel():
        return x.clone()
    dims = (dim1, dim2)
    y = x.movedim(dims, (-2, -1))
    rows, columns = torch.arange(y.shape[-2]), torch.arange(y.shape[-1])
    at = (rows - max(-offset, 0)).clamp(0, src.shape[-1] - 1)
    spread = src.index_select(-1, at).unsqueeze(-1)
    made = torch.where(columns - rows.unsqueeze(-1) == offset, spread, y)
    return made.movedim((-2, -1), dims)


def as_strided_scatter(
    x: Tensor, src: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int = 0
) -> Tensor:
    """As a write to places of all elements in a row."""
    if not x.is_contiguous():
        raise NotImplementedError("its strides are not those of its shape")
    places = torch.full((), storage_offset or 0, dtype=torch.int64)
    for length, step in zip(size, stride, strict=True):
        places = places.unsqueeze(-1) + torch.arange(length) * step
    flat = x.reshape(-1).scatter(0, places.reshape(-1), src.reshape(-1))
    return flat.reshape(x.shape)


def index_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """As `scatter_reduce`, with the place of a row for each of its elements."""
    shape = [1] * x.dim()
    shape[dim] = -1
    places = index.to(torch.int64).reshape(shape).expand(source.shape)
    return scatter_reduce(
        x, dim, places, source, reduce, include_self=include_self, has_extremes=False
    )


def scatter_with(x: Tensor, dim: int, index: Tensor, src: Tensor | float, *, reduce: str) -> Tensor:
    """The sums or products that `scatter(…, reduce=)` takes."""
    values = src if isinstance(src, Tensor) else torch.full(index.shape, src, dtype=x.dtype)
    values = values[tuple(slice(size) for size in index.shape)]
    if reduce == "add":
        return torch.scatter_add(x, dim, index, values)
    return scatter_reduce(x, dim, index, values, "prod", has_extremes=False)


def index_put(
    x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor:
    """Sums into places, as sums into rows.

    torch's exporter expands too few axes of the values; onnxscript's optimizer (0.7) drops a
    ScatterND whose places are all rows, also one that adds.
    """
    given = [index for index in indices if index is not None and index.dtype != torch.bool]
    if not accumulate or len(given) < len(indices):
        raise NotImplementedError("values that replace, or places that a mask or a None gives")
    sizes, inner = x.shape[: len(given)], x.shape[len(given) :]
    place = torch.zeros((), dtype=torch.int64)
    for index, size in zip(given, sizes, strict=True):
        place = place * size + torch.where(index < 0, index + size, index)
    added = values.expand(*place.shape, *inner).reshape(-1, *inner)
    rows = place.reshape(-1, *[1] * len(inner)).expand_as(added)
    return x.reshape(-1, *inner).scatter_add(0, rows, added).reshape(x.shape)


def put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    """X with the values at places of the flat tensor replaced or added to."""
    flat, places = x.reshape(-1), index.reshape(-1)
    return torch.index_put(flat, (places,), source.reshape(-1), accumulate).reshape(x.shape)
