"""The sizes that an artifact is tried at: smallest, the sample's, the largest that is cheap."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.core.capture import Capture
from pt2e_quant.core.export_dims import DimRange
from pt2e_quant.core.input_info import InputKind
from pt2e_quant.core.size_expression import evaluate_size
from pt2e_quant.graph.ops import aten

Sizes = Mapping[str, int]
"""A size for each symbol of a capture."""

CHEAP = 1 << 32
"""Work of a call that is tried without a thought, in multiplications: about a tenth of a second."""

_ELEMENT = 16
"""The cost of one element that is only moved or rounded, in multiplications."""

_BY_WEIGHT = frozenset(
    getattr(aten, name)
    for name in ("linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d")
)
_BY_INNER = frozenset(getattr(aten, name) for name in ("matmul", "mm", "bmm", "addmm", "baddbmm"))


class Work:
    """The amount of computation of a graph at given sizes, read from its nodes' symbolic shapes."""

    def __init__(self, gm: GraphModule) -> None:
        self.terms: dict[tuple[str, ...], int] = {}
        """The count of each product of sizes."""
        for node in gm.graph.nodes:
            if node.op == "call_function":
                self._count(node)

    def _count(self, node: Node) -> None:
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return
        fixed, symbolic = _ELEMENT, []
        for size in (*value.shape, *_depth(node)):
            if isinstance(size, int):
                fixed *= size
            else:
                symbolic.append(str(size.node.expr))
        key = tuple(sorted(symbolic))
        self.terms[key] = self.terms.get(key, 0) + fixed

    def at(self, sizes: Sizes) -> int:
        """The work of a call; a size that cannot be told counts as one."""
        values: dict[str, int] = {}
        total = 0
        for key, count in self.terms.items():
            for size in key:
                if size not in values:
                    values[size] = evaluate_size(size, sizes) or 1
                count *= values[size]
            total += count
        return total


def _depth(node: Node) -> Sequence[Any]:
    """The sizes that each element of a product's result is a sum over, by `_ELEMENT` of them."""
    packet = getattr(node.target, "overloadpacket", None)
    sources = [n.meta.get("val") for n in node.all_input_nodes]
    if packet in _BY_WEIGHT and len(sources) > 1 and isinstance(sources[1], Tensor):
        weight = sources[1].shape[1:]
    elif packet in _BY_INNER and isinstance(sources[-1], Tensor) and sources[-1].dim() > 1:
        weight = sources[-1].shape[-2:-1]
    else:
        return ()
    sizes = list(weight)
    for at, size in enumerate(sizes):
        if isinstance(size, int):
            sizes[at] = max(1, size // _ELEMENT)
            break
    return sizes


def sizes_of(capture: Capture, leaves: Sequence[Any]) -> dict[str, int] | None:
    """The sizes that a call has; None if they cannot all be told from it."""
    found: dict[str, int] = {}
    for info, leaf in zip(capture.inputs, leaves, strict=True):
        if info.kind is InputKind.SYMBOL and str(info.value) in capture.dims:
            found[str(info.value)] = int(leaf)
        if isinstance(leaf, Tensor):
            pairs = zip(info.shape, leaf.shape, strict=True)
            found |= {str(s): int(n) for s, n in pairs if s in capture.dims}
    return found if found.keys() == capture.dims.keys() else None


def plan_sizes(capture: Capture, work: Work, sample: Sizes) -> list[Sizes]:
    """The sizes to try behind the sample's, in order: each twice, large behind small and before.

    With several dimensions also each alone at its smallest.
    """
    if not capture.dims:
        return [sample]
    small = {symbol: limits.smallest() for symbol, limits in capture.dims.items()}
    most = {symbol: _largest(limits, sample[symbol]) for symbol, limits in capture.dims.items()}
    large = {
        symbol: max(size - size % capture.dims[symbol].multiple, sample[symbol])
        for symbol, size in _cheap(most, sample, work).items()
    }
    if work.at(sample) > CHEAP:
        return [small, large]
    mixed = [{**large, symbol: small[symbol]} for symbol in capture.dims]
    plan = [small, large, sample, *(mixed if len(mixed) > 1 else ()), large, small, sample]
    return [sizes for at, sizes in enumerate(plan) if not at or sizes != plan[at - 1]]


def _largest(limits: DimRange, sample: int) -> int:
    return 2 * sample if limits.maximum is None else max(limits.maximum, sample)


def _cheap(large: Sizes, sample: Sizes, work: Work) -> Sizes:
    """The largest sizes whose call is cheap, between twice the sample's and the given ones."""
    found = {symbol: min(size, 2 * sample[symbol]) for symbol, size in large.items()}
    for symbol, most in large.items():
        low, high = found[symbol], most
        while low < high:
            middle = (low + high + 1) // 2
            if work.at({**found, symbol: middle}) <= CHEAP:
                low = middle
            else:
                high = middle - 1
        found[symbol] = low
    return found


def resize(leaf: Tensor, shape: Sequence[int], shift: int) -> Tensor:
    """A tensor of another shape from the elements of one, each dimension taken round and round.

    Args:
        leaf: with as many dimensions as the shape.
        shape: of the result.
        shift: where it starts, in the first dimension and in those whose sizes differ.
    """
    for dim, (size, old) in enumerate(zip(shape, leaf.shape, strict=True)):
        start = shift if dim == 0 or size != old else 0
        if size == old and not start:
            continue
        if not old:
            return torch.zeros(list(shape), dtype=leaf.dtype, device=leaf.device)
        index = (torch.arange(size, device=leaf.device) + start) % old
        leaf = leaf.index_select(dim, index)
    return leaf
