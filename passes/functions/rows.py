"""Functions of rows (orders, scans, searches), in terms of operators that every runtime has."""

import math
import string
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pt2e_quant.graph.ops import each_axis

Results: TypeAlias = Tensor | tuple[Tensor, ...]
"""The result of a function: one tensor, or the first of several."""

_MOST_ROWS = 64
"""Each row of a pairwise distance is an operator of its own."""


def known_size(x: Tensor, dim: int) -> int:
    """The size of a dimension.

    Raises:
        NotImplementedError: it is dynamic, or the tensor has no dimension.
    """
    size = x.shape[dim] if x.dim() else 1
    if not isinstance(size, int) or not x.dim():
        raise NotImplementedError("a dynamic size, or none")
    return size


def sort(x: Tensor, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    """Stable sort along a dimension."""
    if not x.dim():
        raise NotImplementedError("no dimension")
    size = x.shape[dim]
    values, indices = torch.topk(x, size, dim, largest=descending, sorted=True)
    # Runtimes order equal values in ways of their own. The indices are sorted once more, within
    # each run of equal values: behind the number of the run.
    before = values.index_select(dim, (torch.arange(size) - 1).clamp(min=0))
    runs = (values != before).to(torch.int64).cumsum(dim) * size
    within, _ = torch.topk(runs + indices, size, dim, largest=False, sorted=True)
    return values, within - runs


def kthvalue(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The k-th smallest values along a dimension, and where they stand."""
    if not x.dim():
        raise NotImplementedError("no dimension")
    # Of a dynamic size all are sorted: a tensor with k values would hold it to the example's k
    # where that is 1, a size that torch specializes for.
    most = k if isinstance(k, int) else x.shape[dim]
    pair = torch.topk(x, most, dim, largest=False, sorted=True)
    values, indices = (part.narrow(dim, k - 1, 1) for part in pair)
    return (values, indices) if keepdim else (values.squeeze(dim), indices.squeeze(dim))


def median(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The lower of the two middle values along a dimension, and where it stands."""
    if not x.dim():
        raise NotImplementedError("no dimension")
    values, indices = kthvalue(x, (x.shape[dim] + 1) // 2, dim, keepdim)
    if x.is_floating_point():
        values = torch.where(x.isnan().any(dim, keepdim), math.nan, values)
    return values, indices


def median_of_all(x: Tensor) -> Tensor:
    """The lower of the two middle values."""
    return median(x.reshape(-1), 0)[0]


_Combine: TypeAlias = Callable[[Any, Any], Any]


def _scan(
    parts: Sequence[Tensor], dim: int, neutral: Sequence[float], combine: _Combine
) -> tuple[Tensor, ...]:
    """An inclusive scan along a dimension, in steps of doubling distance.

    Args:
        parts: what is carried along.
        dim: the dimension; its size, or the greatest it may be, is known.
        neutral: of each part, what changes nothing when it stands before the first place.
        combine: from what is before and what is behind.
    """
    size, step = _greatest_size(parts[0], dim), 1
    pads = [0, 0] * (parts[0].dim() - 1 - dim % parts[0].dim())
    while step < size:
        pairs = zip(parts, neutral, strict=True)
        padded = [torch.constant_pad_nd(p, [*pads, step, 0], value) for p, value in pairs]
        before = [torch.ops.aten.slice.Tensor(p, dim, 0, -step) for p in padded]
        parts = combine(before, parts)
        step *= 2
    return tuple(parts)


def _greatest_size(x: Tensor, dim: int) -> int:
    """The greatest size of a dimension: as captured, where it is dynamic."""
    size = x.shape[dim] if x.dim() else 1
    if isinstance(size, torch.SymInt):
        greatest = size.node.shape_env.bound_sympy(size.node.expr).upper
        if not greatest.is_Integer:
            raise NotImplementedError("a size without a bound")
        return int(greatest)
    return known_size(x, dim)


def cumprod(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """The product of all up to each place."""
    whole = torch.int64 if not x.is_floating_point() else x.dtype
    values = x.to(dtype or whole)
    return _scan([values], dim, [1], lambda before, after: [before[0] * after[0]])[0]


def logcumsumexp(x: Tensor, dim: int) -> Tensor:
    """The logarithm of the sum of exponentials of all up to each place."""

    def combine(before: Sequence[Tensor], after: Sequence[Tensor]) -> list[Tensor]:
        large, small = torch.maximum(before[0], after[0]), torch.minimum(before[0], after[0])
        gap = torch.where(large == small, 0.0, small - large)  # also of infinities
        return [large + torch.log1p(torch.exp(gap))]

    return _scan([x], dim, [-math.inf], combine)[0]


def _extreme(
    x: Tensor, dim: int, neutral: float, takes: Callable[[Tensor, Tensor], Tensor]
) -> Results:
    """The extreme values up to each place, and where the last of each stands."""
    if not x.dim():
        raise NotImplementedError("no dimension")
    shape: list[Any] = [1] * x.dim()
    shape[dim] = x.shape[dim]
    places = torch.zeros_like(x, dtype=torch.int64) + torch.arange(shape[dim]).reshape(shape)

    def combine(before: Sequence[Tensor], after: Sequence[Tensor]) -> list[Tensor]:
        last = takes(after[0], before[0])
        if x.is_floating_point():
            last = torch.logical_or(last, after[0].isnan())
            last = torch.logical_and(last, ~torch.logical_and(before[0].isnan(), ~after[0].isnan()))
        return [torch.where(last, b, a) for a, b in zip(before, after, strict=True)]

    return _scan([x, places], dim, [neutral, 0], combine)


def _limits(x: Tensor) -> tuple[float, float]:
    """The least and the greatest value of a dtype."""
    if x.is_floating_point():
        return -math.inf, math.inf
    whole = torch.iinfo(x.dtype)
    return whole.min, whole.max


def cummax(x: Tensor, dim: int) -> Results:
    """The largest up to each place, and where it stands."""
    return _extreme(x, dim, _limits(x)[0], torch.ge)


def cummin(x: Tensor, dim: int) -> Results:
    """The smallest up to each place, and where it stands."""
    return _extreme(x, dim, _limits(x)[1], torch.le)


def searchsorted(
    rows: Tensor,
    x: Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:
    """Count the sorted values below each value."""
    if sorter is not None:
        raise NotImplementedError("a permutation of the sorted values")
    others = rows if rows.dim() == 1 else rows.unsqueeze(-2)
    value = x.unsqueeze(-1)
    below = others <= value if right or side == "right" else others < value
    return below.to(torch.int64).sum(-1).to(torch.int32 if out_int32 else torch.int64)


def pad(
    x: Tensor, pads: Sequence[int], mode: str = "constant", value: float | None = None
) -> Tensor:
    """Edges repeated, where others are cropped: of an axis that is cropped whole too."""
    if mode != "replicate" or all(isinstance(n, int) and n >= 0 for n in pads):
        raise NotImplementedError("which runtimes take")
    for at, (before, behind) in enumerate(zip(pads[::2], pads[1::2], strict=True)):
        size = x.shape[-1 - at]
        places = torch.arange(size + before + behind) - before
        x = x.index_select(-1 - at, places.clamp(min=0).clamp(max=size - 1))
    return x


def histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Count the values in each of `bins` ranges of one width; those outside count nowhere."""
    if min >= max:
        raise NotImplementedError("ranges between the least and the greatest value")
    place = ((x.flatten() - min) * (bins / (max - min))).floor()
    place = torch.where(x.flatten() == max, float(bins - 1), place)
    return (place == torch.arange(bins).unsqueeze(-1)).to(x.dtype).sum(-1)


def bucketize(
    x: Tensor, boundaries: Tensor, *, out_int32: bool = False, right: bool = False
) -> Tensor:
    """Count the sorted boundaries below each value."""
    return searchsorted(boundaries, x, out_int32=out_int32, right=right)


def adaptive_max_pool(x: Tensor, output_size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The greatest value of each window, and where in the image the first of it stands."""
    if not all(isinstance(count, int) for count in output_size):
        raise NotImplementedError("a dynamic number of windows")
    sizes = x.shape[-len(output_size) :]
    places = torch.arange(math.prod(sizes)).reshape(sizes).expand_as(x)
    for dim, count in zip(range(-1, -len(sizes) - 1, -1), reversed(output_size), strict=True):
        size = x.shape[dim]
        # Of a dynamic size, runtimes may round quotients of negative numbers towards zero.
        ends = [(at * size // count, ((at + 1) * size + count - 1) // count) for at in range(count)]
        parts = [(x.narrow(dim, a, b - a), places.narrow(dim, a, b - a)) for a, b in ends]
        x = torch.cat([values.amax(dim, keepdim=True) for values, _ in parts], dim)
        first = [at.gather(dim, v.argmax(dim, keepdim=True)) for v, at in parts]
        places = torch.cat(first, dim)
    return x, places


def sizes_at_one(
    kernel: Sequence[int], pads: Sequence[int], steps: Sequence[int], extra: Sequence[int]
) -> list[int]:
    """The sizes that a transposed convolution gives where its input's are 1: 0 or less is nothing.

    Args:
        kernel: its sizes.
        pads: the padding of each axis.
        steps: the dilation.
        extra: the output padding.
    """
    return [
        step * (size - 1) + 1 + more - 2 * pad
        for size, pad, step, more in zip(kernel, pads, steps, extra, strict=True)
    ]


def conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    output_padding: Sequence[int] = (0,),
    groups: int = 1,
    dilation: Sequence[int] = (1,),
) -> Tensor:
    """A transposed convolution that ONNX Runtime rejects: the whole result, cropped and padded.

    It takes no output padding that is not below the stride, and no size without a result.
    """
    dims = weight.dim() - 2
    strides, pads, extra, steps = (
        each_axis(given, dims) for given in (stride, padding, output_padding, dilation)
    )
    least = sizes_at_one(weight.shape[2:], pads, steps, extra)
    ends = [
        one if not isinstance(size, int) else one + (size - 1) * step
        for size, one, step in zip(x.shape[-dims:], least, strides, strict=True)
    ]
    if min(ends) > 0 and all(more < step for more, step in zip(extra, strides, strict=True)):
        raise NotImplementedError("runtimes take it")
    none = [0] * dims
    whole = torch.ops.aten.convolution(x, weight, None, strides, none, steps, True, none, groups)
    cuts = [(-pad, more - pad) for pad, more in zip(pads, extra, strict=True)]
    made = torch.constant_pad_nd(whole, [cut for pair in reversed(cuts) for cut in pair])
    return made if bias is None else made + bias.reshape(-1, *[1] * dims)


def aminmax(x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Both, each along named dimensions: ONNX's exporter asks for them."""
    dims = list(range(x.dim())) if dim is None else [dim]
    return x.amin(dims, keepdim), x.amax(dims, keepdim)


def mode(x: Tensor, dim: int = -1, keepdim: bool = False) -> tuple[Tensor]:
    """The least of the most frequent values; not where it stands."""
    rows = x.movedim(dim, -1)
    counts = (rows.unsqueeze(-1) == rows.unsqueeze(-2)).to(torch.int64).sum(-1)
    greatest = math.inf if x.is_floating_point() else torch.iinfo(x.dtype).max
    often = torch.where(counts == counts.amax(-1, keepdim=True), rows, greatest)
    found = often.amin(-1)
    return (found.unsqueeze(dim) if keepdim else found,)


def cdist(x: Tensor, y: Tensor, p: float = 2.0, compute_mode: int | None = None) -> Tensor:
    """Distances of the rows of x[..., P, M] and y[..., R, M] in the p-norm."""
    apart = (x.unsqueeze(-2) - y.unsqueeze(-3)).abs()
    if math.isinf(p):
        return apart.amax(-1)
    if p == 0:
        return (apart != 0).to(apart.dtype).sum(-1)
    if p == 1:
        return apart.sum(-1)
    if p == 2:
        return torch.sqrt((apart * apart).sum(-1))
    return torch.pow(torch.pow(apart, p).sum(-1), 1.0 / p)


def trilinear(
    x: Tensor,
    y: Tensor,
    z: Tensor,
    expand_x: Sequence[int],
    expand_y: Sequence[int],
    expand_z: Sequence[int],
    summed: Sequence[int],
    unroll_dim: int = 1,
) -> Tensor:
    """The sum over dimensions of x * y * z, each expanded by others; nn.Bilinear becomes one."""
    letters = string.ascii_lowercase[: x.dim() + len(expand_x)]
    x_dims, y_dims, z_dims, kept = (
        "".join(letter for dim, letter in enumerate(letters) if dim not in left_out)
        for left_out in (expand_x, expand_y, expand_z, summed)
    )
    return torch.einsum(f"{x_dims},{y_dims},{z_dims}->{kept}", x, y, z)


def pdist(x: Tensor, p: float = 2.0) -> Tensor:
    """Distances of each row to those behind it."""
    count = known_size(x, 0)
    if count > _MOST_ROWS:
        raise NotImplementedError(f"a distance of more than {_MOST_ROWS} rows")
    if count < 2:
        return torch.full([0], 0.0, dtype=x.dtype)
    parts = [(x.narrow(0, at, 1), x.narrow(0, at + 1, count - at - 1)) for at in range(count - 1)]
    return torch.cat([cdist(row, rest, p).squeeze(0) for row, rest in parts])


def cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The cross-entropy with smoothed labels or probabilities: ONNX's has neither.

    Args:
        x: logits [N, C, ...], or [C].
        target: classes [N, ...] or one; or a probability of each, as `x`.
        weight: of each class.
        reduction: ATen's number for none (0), the mean (1) or the sum (2).
        ignore_index: a class that does not count.
        label_smoothing: what of each label goes to all classes.
    """
    if label_smoothing == 0 and not target.is_floating_point():
        raise NotImplementedError("which runtimes take")
    dim = 0 if x.dim() == 1 else 1
    log = torch.log_softmax(x, dim)
    ones = torch.ones_like(log)
    each = ones if weight is None else ones * weight.reshape([-1] + [1] * (x.dim() - 1 - dim))
    if target.is_floating_point():
        shares = target * (1 - label_smoothing) + label_smoothing / x.shape[dim]
        loss = -(log * each * shares).sum(dim)
        return loss if reduction == 0 else loss.mean() if reduction == 1 else loss.sum()
    counts = target != ignore_index
    picked = torch.where(counts, target, 0)
    at = picked.unsqueeze(dim)
    share = torch.where(counts, each.gather(dim, at).squeeze(dim), 0.0)
    hard = -log.gather(dim, at).squeeze(dim) * share
    smooth = -torch.where(counts, (log * each).sum(dim), 0.0)
    loss = (1 - label_smoothing) * hard + label_smoothing / x.shape[dim] * smooth
    if reduction == 0:
        return loss
    return loss.sum() / share.sum() if reduction == 1 else loss.sum()
