"""Give a small member of a concatenation a range of its own, for what else reads it."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.fx import Node

from pt2e_quant.graph.meta import copy_trace
from pt2e_quant.graph.ops import PAD, argument, is_call
from pt2e_quant.observers.static.minmax import min_max_like
from pt2e_quant.observers.statistics.base import Statistics
from pt2e_quant.observers.statistics.channel_statistics import ChannelStatistics
from pt2e_quant.observers.training.trained_qparams import is_fake_quantize, qparams_of
from pt2e_quant.passes.algorithms.algorithm import Algorithm, Site, Stage
from pt2e_quant.passes.algorithms.algorithm_graph import OUT, AlgorithmGraph, is_static_per_tensor
from pt2e_quant.passes.algorithms.grid import Declined

__all__ = ["SPLIT_KEY", "OwnRanges", "SharedRange", "shared_ranges", "split_range"]

SPLIT_KEY = "pt2e_quant.split_range"
"""The key of an observer node's `meta` where a range was split: the name of the observer node that
told what it is for."""


@dataclass(slots=True, eq=False)
class Unit:
    """A tensor of a shared range, and what only moves its data.

    Args:
        source: what makes it.
        observed: the observer nodes of all of them.
        merges: what joins one of them with other values of the range, with its observer node.
        has_others: something reads one of them whose result has no part in the range.
    """

    source: Node
    observed: list[Node]
    merges: list[tuple[Node, Node]] = field(default_factory=list)
    has_others: bool = False


@dataclass(slots=True, eq=False)
class SharedRange:
    """The tensors of one observer.

    Args:
        observer: theirs.
        units: by what makes the tensor, in graph order.
        ratios: once they are known, how much wider the range is than that of the tensors that
            stay joined with one; or why it keeps the range.
    """

    observer: Any
    units: dict[Node, Unit]
    ratios: dict[Node, float | str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRanges(Algorithm):
    """Give a tensor a range of its own where the one it shares is much wider.

    The operands of a concatenation (a maximum, a choice) and its result share one range, so that
    the runtime copies integers. An operand of a much smaller range keeps few of its steps: where
    something else reads it too, that is all it gets. So the operand is quantized over its own
    range, and once more over the shared one for the concatenation alone. Tensors of alike range
    that are joined with each other stay together.

    Before:  xq = observe_all(x);  y = observe_all(cat([xq, z]));  other(xq)
    After:   xq = observe_own(x);  y = observe_all(cat([observe_all(xq), z]));  other(xq)

    Args:
        least_ratio: by what factor the shared range must be wider. Between operands of alike range
            (a DenseNet) a second rounding costs more than it saves.
    """

    name: ClassVar[str] = "own_ranges"
    paper: ClassVar[str] = "a range for each tensor, as ONNX Runtime's quantize_static has it"
    fits: ClassVar[str] = (
        "operands of concatenations with calibrated (static) integers that others read too"
    )
    stage: ClassVar[Stage] = Stage.RANGES

    least_ratio: float = 4.0

    def sites(self, graph: AlgorithmGraph) -> Iterable[Site]:
        """The tensors of ranges that several share, of which others read one too."""
        for shared in shared_ranges(graph):
            for source in shared.units:
                yield Site(graph, source, OUT, shared)

    def statistics(self, site: Site) -> Statistics:
        """The range of the tensor alone."""
        return ChannelStatistics()

    def apply(self, site: Site, statistics: Statistics | None) -> str:
        """Split one tensor from the range that it shares; the first site of a range splits all."""
        shared: SharedRange = site.plan
        if shared.ratios is None:
            shared.ratios = self._split(site.graph, shared)
        ratio = shared.ratios[site.node]
        if isinstance(ratio, str):
            raise Declined(ratio)
        if ratio < self.least_ratio:
            raise Declined(f"the range that it shares is {ratio:.2g} times its own")
        return f"{self.name}: the range that it shares is {ratio:.0f} times as wide"

    def _split(self, graph: AlgorithmGraph, shared: SharedRange) -> dict[Node, float | str]:
        seen: dict[Node, ChannelStatistics] = {}
        for source in shared.units:
            found = graph.gathered.statistics.get((self.name, source, OUT))
            if isinstance(found, ChannelStatistics) and found.seen:
                seen[source] = found
        scales = {n: _scale(_own(shared.observer, [found])) for n, found in seen.items()}
        found_out: dict[Node, float | str] = {}
        observers: dict[Node, Any] = {}
        whole = _scale(shared.observer)
        for part in _parts(shared, scales, self.least_ratio):
            known = [seen[n] for n in part if n in seen]
            if len(known) < len(part):
                reason: float | str = "the calibrated tensors differ in their last axis"
            elif not any(bool((one.low < one.high).any()) for one in known):
                reason = "it is constant in calibration"
            elif not any(shared.units[n].has_others for n in part):
                reason = "nothing reads it but what it is joined with"
            else:
                own = _own(shared.observer, known)
                reason = whole / _scale(own)
                if reason >= self.least_ratio:
                    observers |= dict.fromkeys(part, own)
            found_out |= dict.fromkeys(part, reason)
        split_range(graph, shared, observers)
        return found_out


def _own(observer: Any, seen: Sequence[ChannelStatistics]) -> Any:
    """An observer like another that saw some tensors alone."""
    own = copy.deepcopy(observer) if hasattr(observer, "set_extremes") else min_max_like(observer)
    own.set_extremes(
        torch.cat([one.low.amin(1) for one in seen]), torch.cat([one.high.amax(1) for one in seen])
    )
    return own


def _scale(observer: Any) -> float:
    return float(qparams_of(observer).scale)


def _parts(
    shared: SharedRange, scales: Mapping[Node, float], least_ratio: float
) -> list[list[Node]]:
    """The tensors in parts: joined ones of alike range are in one part."""
    part = {source: [source] for source in shared.units}
    for source, unit in shared.units.items():
        for merge, _ in unit.merges:
            pair = [scales[node] for node in (source, merge) if node in scales]
            if len(pair) == 2 and max(pair) >= least_ratio * min(pair):
                continue
            if part[source] is not part[merge]:
                part[source] += part[merge]
                for node in part[merge]:
                    part[node] = part[source]
    return list({id(nodes): nodes for nodes in part.values()}.values())


def split_range(graph: AlgorithmGraph, shared: SharedRange, observers: Mapping[Node, Any]) -> None:
    """Observe some tensors of a range by others, and again where they are joined with the rest.

    Args:
        graph: of the observers.
        shared: the range.
        observers: those that get another one, by what makes the tensor.
    """
    gm = graph.gm
    for source, own in observers.items():
        for node in shared.units[source].observed:
            gm.set_submodule(str(node.target), own)
            node.meta[SPLIT_KEY] = str(node.target)
    for source, unit in shared.units.items():
        for merge, node in unit.merges:
            wanted = observers.get(merge, shared.observer)
            if wanted is observers.get(source, shared.observer):
                continue
            name = graph.editor.unique_name("joined_range")
            gm.add_submodule(name, wanted)
            with gm.graph.inserting_before(merge):
                joined = gm.graph.call_module(name, (node,))
            joined.meta["val"] = node.meta.get("val")
            copy_trace(joined, node)
            joined.meta[SPLIT_KEY] = str(node.target)
            merge.replace_input_with(node, joined)
    graph.editor.changed = graph.editor.changed or bool(observers)


def shared_ranges(graph: AlgorithmGraph) -> Iterator[SharedRange]:
    """The ranges that joined tensors share, and that others read too."""
    found: dict[int, SharedRange] = {}
    for node in graph.gm.graph.find_nodes(op="call_module"):
        observer, (source,) = graph.observer(node), node.all_input_nodes
        if _is_open(graph, node) and _is_unit(graph, source, observer):
            shared = found.setdefault(id(observer), SharedRange(observer, {}))
            shared.units[source] = _unit(graph, node)
    for shared in found.values():
        units = shared.units.values()
        # Nodes of a range that are no units (a masked tensor) have no place to be split at.
        is_whole = all(merge in shared.units for unit in units for merge, _ in unit.merges)
        if is_whole and any(unit.merges and unit.has_others for unit in units):
            yield shared


def _is_unit(graph: AlgorithmGraph, source: Node, observer: Any) -> bool:
    """True if an operator does more than move data of a range."""
    return len(_operands(graph, source, observer)) != 1 or _adds_a_number(source)


def _unit(graph: AlgorithmGraph, root: Node) -> Unit:
    observer, unit = graph.observer(root), Unit(root.all_input_nodes[0], [root])
    for node in unit.observed:  # it grows
        for reader in node.users:
            made = next((u for u in reader.users if graph.observer(u) is observer), None)
            if made is None:
                unit.has_others = True
            elif _is_unit(graph, reader, observer):
                unit.merges.append((reader, node))
            else:
                unit.observed.append(made)
    return unit


def _adds_a_number(reader: Node) -> bool:
    """True if a pad puts in values that the tensor may not have; every range holds 0."""
    return is_call(reader, PAD) and bool(argument(reader, "value"))


def _operands(graph: AlgorithmGraph, node: Node, observer: Any) -> list[Node]:
    """The operands of an operator that share a range."""
    return [operand for operand in node.all_input_nodes if graph.observer(operand) is observer]


def _is_open(graph: AlgorithmGraph, node: Node) -> bool:
    """True if an observer node finds the static range of an activation outside of training."""
    observer = graph.observer(node)
    if not is_static_per_tensor(observer) or is_fake_quantize(observer):
        return False
    has_hidden = getattr(observer, "ignore_at_or_below", None) is not None
    source = node.all_input_nodes[0]
    return not has_hidden and source.op not in ("get_attr", "call_module")
