"""Give a small member of a concatenation a range of its own, for what else reads it."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

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

__all__ = ["SPLIT_KEY", "OwnRanges", "SharedPlaces", "split_range"]

SPLIT_KEY = "pt2e_quant.split_range"
"""The key of an observer node's `meta` where a range was split: the name of the observer node that
told what it is for."""


@dataclass(frozen=True, slots=True)
class SharedPlaces:
    """A tensor of a shared range, and what only moves its data.

    Args:
        observed: the observer nodes of all of them.
        merges: what joins one of them with other values of the range, with its observer node.
    """

    observed: tuple[Node, ...]
    merges: tuple[tuple[Node, Node], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRanges(Algorithm):
    """Give a tensor a range of its own where the one it shares is much wider.

    The operands of a concatenation (a maximum, a choice) and its result share one range, so that
    the runtime copies integers. An operand of a much smaller range keeps few of its steps: where
    something else reads it too, that is all it gets. So the operand is quantized over its own
    range, and once more over the shared one for the concatenation alone.

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

    least_ratio: float = 8.0

    def sites(self, graph: AlgorithmGraph) -> Iterable[Site]:
        """The tensors that others read too, themselves or moved, of all that are joined."""
        for node in graph.gm.graph.find_nodes(op="call_module"):
            (source,) = node.all_input_nodes
            if _is_open(graph, node) and not _operands(graph, source, graph.observer(node)):
                plan = _plan(graph, node)
                if plan is not None:
                    yield Site(graph, source, OUT, plan)

    def statistics(self, site: Site) -> Statistics:
        """The range of the tensor alone."""
        return ChannelStatistics()

    def apply(self, site: Site, statistics: Statistics | None) -> str:
        """Split one tensor from the range that it shares."""
        if not isinstance(statistics, ChannelStatistics):
            raise Declined("the calibrated tensors differ in their last axis, or there were none")
        shared = site.graph.observer(site.plan.observed[0])
        low, high = statistics.low.amin(1), statistics.high.amax(1)
        if not bool((low < high).any()):
            raise Declined("it is constant in calibration")
        own = copy.deepcopy(shared) if hasattr(shared, "set_extremes") else min_max_like(shared)
        own.set_extremes(low, high)
        ratio = float(qparams_of(shared).scale / qparams_of(own).scale)
        if ratio < self.least_ratio:
            raise Declined(f"the range that it shares is {ratio:.2g} times its own")
        split_range(site.graph, site.plan, own)
        return f"{self.name}: the range that it shares is {ratio:.0f} times as wide"


def split_range(graph: AlgorithmGraph, plan: SharedPlaces, own: Any) -> None:
    """Observe a tensor by `own`, and as before where it is joined with others."""
    gm, shared = graph.gm, graph.observer(plan.observed[0])
    for node in plan.observed:
        gm.set_submodule(str(node.target), own)
        node.meta[SPLIT_KEY] = str(node.target)
    for merge, node in plan.merges:
        name = graph.editor.unique_name("joined_range")
        gm.add_submodule(name, shared)
        with gm.graph.inserting_before(merge):
            joined = gm.graph.call_module(name, (node,))
        joined.meta["val"] = node.meta.get("val")
        copy_trace(joined, node)
        joined.meta[SPLIT_KEY] = str(node.target)
        merge.replace_input_with(node, joined)
    graph.editor.changed = True


def _plan(graph: AlgorithmGraph, root: Node) -> SharedPlaces | None:
    """How to split a tensor from the range that it shares; None if nothing else reads it."""
    observer = graph.observer(root)
    observed, merges, has_others, is_joined = [root], [], False, False
    for node in observed:  # it grows
        for reader in node.users:
            made = next((u for u in reader.users if graph.observer(u) is observer), None)
            count = len(_operands(graph, reader, observer))
            if made is None:
                has_others = True
            elif count > 1 or _adds_a_number(reader):
                merges.append((reader, node))
                is_joined = is_joined or count > 1
            else:
                observed.append(made)
    return SharedPlaces(tuple(observed), tuple(merges)) if is_joined and has_others else None


def _adds_a_number(reader: Node) -> bool:
    """Whether a pad puts in values that the tensor may not have; every range holds 0."""
    return is_call(reader, PAD) and bool(argument(reader, "value"))


def _operands(graph: AlgorithmGraph, node: Node, observer: Any) -> list[Node]:
    """The operands of an operator that share a range."""
    return [operand for operand in node.all_input_nodes if graph.observer(operand) is observer]


def _is_open(graph: AlgorithmGraph, node: Node) -> bool:
    """Whether an observer node finds the static range of an activation outside of training."""
    observer = graph.observer(node)
    if not is_static_per_tensor(observer) or is_fake_quantize(observer):
        return False
    has_hidden = getattr(observer, "ignore_at_or_below", None) is not None
    source = node.all_input_nodes[0]
    return not has_hidden and source.op not in ("get_attr", "call_module")
