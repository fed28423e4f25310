"""Functions whose windows, groups or places are known at run time only, as products and choices."""

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node

from pt2e_quant.graph.ops import each_axis

_NEUTRAL = {"amax": -math.inf, "amin": math.inf, "prod": 1.0}


def grouped_product(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """Rows in the order of their groups, each by its group's matrix; those behind all groups are 0.

    Every row is multiplied by all matrices: to gather a matrix for each row would take more memory
    than there is for a prompt.

    Args:
        x: [S, K].
        weight: [groups, K, N].
        offs: int[groups], behind the last row of each group.
    """
    places = torch.arange(x.shape[0])
    group = (offs <= places.unsqueeze(-1)).sum(-1)
    is_in = group == torch.arange(weight.shape[0]).unsqueeze(-1)
    products = torch.matmul(x.unsqueeze(0), weight)
    return torch.where(is_in.unsqueeze(-1), products, 0.0).sum(0)


def conv_of_groups(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> Tensor:
    """A convolution with a dynamic number of groups, as a product of each group's windows.

    Filters that a model computes for each image of a batch are such.
    """
    if isinstance(groups, int):
        raise NotImplementedError("a fixed number of groups, which runtimes take")
    dims = weight.dim() - 2
    if dims == 1:
        one = conv_of_groups(
            x.unsqueeze(-2),
            weight.unsqueeze(-2),
            bias,
            (1, *stride),
            (0, *padding),
            (1, *dilation),
            groups,
        )
        return one.squeeze(-2)
    batch, _, *spatial = x.shape
    stride, padding, dilation = (each_axis(given, dims) for given in (stride, padding, dilation))
    inner, kernel = weight.shape[1], weight.shape[2:]
    windows = F.unfold(
        x.reshape(batch * groups, inner, *spatial), kernel, dilation, padding, stride
    )
    each = windows.reshape(batch, groups, windows.shape[1], windows.shape[2])
    filters = weight.reshape(groups, -1, inner * kernel.numel())
    sizes = [
        (size + 2 * pad - step * (width - 1) - 1) // by + 1
        for size, pad, step, width, by in zip(
            spatial, padding, dilation, kernel, stride, strict=True
        )
    ]
    y = torch.matmul(filters, each).reshape(batch, weight.shape[0], *sizes)
    return y if bias is None else y + bias.reshape(-1, *[1] * dims)


def scatter_reduce(
    x: Tensor,
    dim: int,
    index: Tensor,
    src: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
    has_extremes: bool = True,
) -> Tensor:
    """Means and sums at places, as sums of `scatter_add`.

    Args:
        x: what stands at the places before.
        dim: along which `index` says the place.
        index: as large as `x` along other dimensions.
        src: what is reduced, as large as `index` at least.
        reduce: sum, mean, amax, amin or prod.
        include_self: reduce `x` too, where something else is.
        has_extremes: leave amax, amin and prod to the runtime; else they are written with a choice
            between all places for each value.
    """
    if has_extremes and reduce in _NEUTRAL:
        raise NotImplementedError("which runtimes take")
    if not x.dim() or not x.is_floating_point():
        raise NotImplementedError("integers, or no dimension")
    if reduce in _NEUTRAL:
        return _extremes(x, dim % x.dim(), index, src, reduce, include_self)
    ones = torch.ones_like(x)
    count = torch.scatter_add(torch.zeros_like(x), dim, index, torch.ones_like(src))
    if include_self:
        total, count = torch.scatter_add(x, dim, index, src), count + ones
    else:
        kept = torch.where(count > 0, 0.0, x)
        total, count = torch.scatter_add(kept, dim, index, src), torch.maximum(count, ones)
    return total / count if reduce == "mean" else total


def _extremes(
    x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, include_self: bool
) -> Tensor:
    """The extreme of all values that go to each place; memory grows with places times values."""
    others = [at for at in range(x.dim()) if at != dim]
    if any(not _is_same(index.shape[at], x.shape[at]) for at in others):
        raise NotImplementedError("places of a part of the tensor")
    for at in range(x.dim()):
        if not _is_same(src.shape[at], index.shape[at]):
            src = src.narrow(at, 0, index.shape[at])
    places = torch.arange(x.shape[dim]).reshape([-1 if at == dim else 1 for at in range(x.dim())])
    hit = index.unsqueeze(dim) == places.unsqueeze(dim + 1)
    values = torch.where(hit, src.unsqueeze(dim), _NEUTRAL[reduce])
    if reduce == "prod":
        found = values.prod(dim + 1)
        alone, both = found, x * found
    else:
        found = values.amax(dim + 1) if reduce == "amax" else values.amin(dim + 1)
        both = torch.maximum(x, found) if reduce == "amax" else torch.minimum(x, found)
        alone = found
    return both if include_self else torch.where(hit.any(dim + 1), alone, x)


def _is_same(a: int, b: int) -> bool:
    """True if two sizes are written alike; asking for equality would add a guard."""
    return str(a) == str(b)


def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = -1,
) -> tuple[Tensor]:
    """Sums, means or maxima of a table's rows, bag by bag.

    Maxima take the memory of all rows for each bag.

    Args:
        weight: the table.
        indices: the rows of all bags, one after another.
        offsets: where each bag begins; with `include_last_offset`, and where the last ends.
        scale_grad_by_freq: of training.
        mode: 0 for sums, 1 for means, 2 for maxima.
        sparse: of training.
        per_sample_weights: a factor for each index, of sums alone.
        include_last_offset: see `offsets`.
        padding_idx: a row that no bag takes; -1 or None is none.
    """
    begins = offsets[:-1] if include_last_offset else offsets
    count, bags = indices.shape[0], begins.shape[0]
    starts = torch.zeros(count + 1, dtype=torch.int64)
    bag = starts.index_add(0, begins.to(torch.int64), torch.ones_like(begins, dtype=torch.int64))
    bag = bag.cumsum(0)[:-1] - 1
    share = torch.ones_like(indices, dtype=weight.dtype)
    if padding_idx is not None and padding_idx >= 0:
        share = (indices != padding_idx).to(weight.dtype)
    rows = torch.nn.functional.embedding(indices, weight)
    if mode == _MAX:
        is_in = torch.logical_and(bag == torch.arange(bags).unsqueeze(1), share > 0)
        found = torch.where(is_in.unsqueeze(2), rows.unsqueeze(0), -math.inf).amax(1)
        return (torch.where(is_in.any(1, keepdim=True), found, 0.0),)
    taken = share if per_sample_weights is None else share * per_sample_weights
    sums = rows.new_zeros(bags, weight.shape[1]).index_add(0, bag, rows * taken.unsqueeze(1))
    if mode == 0:
        return (sums,)
    counts = share.new_zeros(bags).index_add(0, bag, share)
    return (sums / counts.clamp(min=1.0).unsqueeze(1),)


_MAX = 2


def sizes_for_numbers(node: Node) -> tuple[int, ...]:
    """The positions at which an operator of ATen takes a number and is given a dynamic size."""
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return ()
    given = zip(node.target._schema.arguments, node.args, strict=False)
    return tuple(
        at
        for at, (parameter, value) in enumerate(given)
        if isinstance(parameter.type, torch.NumberType)
        and isinstance(value, Node)
        and isinstance(value.meta.get("val"), torch.SymInt)
    )


def with_tensors(node: Node, places: Collection[int]) -> Callable[..., Tensor] | None:
    """A call with tensors of no dimension for numbers at some places, where there is such a one."""
    packet, names = node.target.overloadpacket, [p.name for p in node.target._schema.arguments]  # type: ignore[union-attr]  # `sizes_for_numbers` found an overload
    for form in packet.overloads():
        overload: OpOverload = getattr(packet, form)
        parameters = overload._schema.arguments
        if [p.name for p in parameters] == names and all(
            isinstance(parameters[at].type, torch.TensorType) for at in places
        ):
            return functools.partial(_call_with_tensors, overload, places)
    return None


def _call_with_tensors(overload: OpOverload, places: Collection[int], *args: Any) -> Tensor:
    """A call with tensors of no dimension for the numbers at some places."""
    dtype = torch.result_type(next(v for v in args if isinstance(v, Tensor)), 1)
    found: Tensor = overload(
        *(torch.scalar_tensor(v, dtype=dtype) if i in places else v for i, v in enumerate(args))
    )
    return found
