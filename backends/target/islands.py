"""Choose which operators of a q/dq graph compute in integers, by what each form of them costs.

An operator that is faster in integers may not be worth the conversions around it. What is fastest
for a whole graph is a minimum cut: operators in integers stand on one side, those in float on the
other, and each value that crosses pays its conversion (Stone, "Multiprocessor Scheduling with the
Aid of Network Flow Algorithms", 1977).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule, Node

from pt2e_quant.backends.target.in_float import (
    MOVES,
    behind_clips,
    computed_reads,
    put_in_float,
    real_of,
)
from pt2e_quant.backends.target.layouts import Layout, layouts
from pt2e_quant.backends.target.leave_slower import (
    BYTES,
    elements_of,
    is_marked_slower,
    is_rounded,
)
from pt2e_quant.backends.target.speed_classes import CONVS, Work, work_of
from pt2e_quant.backends.target.times import predict, times_here
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.graph.op_table import ALLOWED_KEY, SLOWER
from pt2e_quant.graph.ops import LINEAR, MAX_POOL2D, PERMUTE, is_call
from pt2e_quant.graph.pipeline import Note, PassResult

if TYPE_CHECKING:
    import networkx as nx

_CALL_NS = 2000.0
"""One more operator of a runtime costs that much, however small it is."""
_SHUFFLED = 5
"""The dimensions in which channels of images are shuffled."""
_CONVERSIONS = 15
"""So many measurements tell what a conversion takes."""
_LEAST_NS = 10000.0
"""Islands that cost less than that more than float stay: the call of an artifact takes as long."""
_MARGIN = 1.1
"""By so much are operators in integers to be faster than in float."""

_INTEGERS, _FLOATS = "integers", "floats"

_Predicted = Callable[..., dict[str, float]]
"""`predict` by measured times, for work and the number of measurements to take the median of."""

_Place = Node | Layout
"""What is on one side of the cut; a layout is that of integers or that of floats."""


@dataclass(frozen=True, slots=True)
class _Quantized:
    """The integers made of an operator's result."""

    source: _Place


@dataclass(frozen=True)
class _Costs:
    """What the operators of a graph cost, in nanoseconds."""

    integer: dict[_Place, float]
    floating: dict[_Place, float]
    quantize: dict[_Place, float]
    """By the operator whose result is quantized."""
    dequantize: dict[tuple[_Place, _Place], float]
    """By the operator that makes a value and one that reads it."""
    enter: dict[tuple[_Place, _Place], float]
    """What more it costs to read in integers what was made in float, likewise."""
    layout: dict[tuple[Node, Layout], float]
    """What it costs that a convolution and float operators beside it have different layouts."""

    @cached_property
    def readers(self) -> Mapping[_Place, list[_Place]]:
        """The operators that read each one's result."""
        found = defaultdict(list)
        for source, reader in self.dequantize:
            found[source].append(reader)
        return found

    @cached_property
    def beside(self) -> Mapping[_Place, list[tuple[Node, Layout]]]:
        """The keys of `layout`, by either."""
        found = defaultdict(list)
        for pair in self.layout:
            for one in pair:
                found[one].append(pair)
        return found

    @cached_property
    def sources(self) -> Mapping[_Place, list[_Place]]:
        """The operators whose results each one reads."""
        found = defaultdict(list)
        for source, reader in self.dequantize:
            found[reader].append(source)
        return found

    def is_chosen(self, node: _Place) -> bool:
        """True for an operator that could be in either form, and whose form matters."""
        return 0 < self.integer.get(node, math.inf) < math.inf


def leave_slower_islands(gm: GraphModule, backend: str) -> PassResult:
    """Put operators in float that the whole graph is faster with so; a backend's pass calls it.

    Args:
        gm: a q/dq graph.
        backend: the name of the backend's folder.
    """
    is_allowed = SLOWER in gm.meta.get(ALLOWED_KEY, ())
    reasons = {} if is_allowed else slower_islands(gm, backend)
    changed = put_in_float(gm, reasons) if reasons else False
    firsts = {text: name for name, text in reversed(reasons.items()) if text}
    return PassResult(changed, tuple(Note(name, text) for text, name in firsts.items()))


def slower_islands(gm: GraphModule, backend: str) -> dict[str, str]:
    """The operators that a whole graph is faster with in float, and why.

    Operators on 8 bits are judged that were timed on a CPU like this one; others stay as they are.

    Args:
        gm: a canonical graph.
        backend: the name of the backend's folder, whose times are read.

    Returns:
        Reasons by the name of a node, "" for those around it that are in float in any case; empty
        where nothing was timed on a CPU like this one.
    """
    times = times_here(backend)
    if not times:
        return {}
    # Layers of one network are of few sizes.
    costs = _costs(gm, cache(partial(predict, times)))
    # Float is exact: integers are to be faster by more than times are told apart.
    weighed = replace(costs, integer={n: _MARGIN * cost for n, cost in costs.integer.items()})
    islands = _islands(weighed, _cut(weighed))
    won = sum(_total(weighed, one, set()) - _total(weighed, one, one) for one in islands)
    if won < _LEAST_NS:
        return {}
    found: dict[str, str] = {}
    for island in islands:
        before, after = _total(costs, island, set()), _total(costs, island, island)
        chosen = {node for node in island if costs.is_chosen(node)}
        text = (
            f"{len(chosen)} operators and the conversions around them take about "
            f"{before / 1e3:,.0f} us in integers on a CPU like this, {after / 1e3:,.0f} us in float"
        )
        operators = (n for n in island if not isinstance(n, Layout))
        found |= {n.name: "" if math.isinf(costs.integer[n]) else text for n in operators}
    return found


def _costs(gm: GraphModule, predicted: _Predicted) -> _Costs:
    left = {record.node for record in provenance_of(gm).floats}
    found = _Costs({}, {}, {}, {}, {}, {})
    reads = {node: computed_reads(gm, node) for node in gm.graph.nodes}
    read_by = [node for node, dequantizes in reads.items() if dequantizes]
    for node in read_by:
        is_float = node.name in left or is_marked_slower(node)
        forms = None if is_float else _forms(node, reads[node], predicted)
        found.integer[node], found.floating[node] = forms or (math.inf, 0.0)
    free = layouts(gm, {node for node in read_by if not math.isinf(found.integer[node])})
    kept = {node for layout in free for node in layout.operators}
    for node in read_by:
        for read in reads[node]:
            _add_conversions(found, gm, predicted, read, node, kept)
    for layout in free:
        found.integer[layout] = found.floating[layout] = 0.0
        for conv, beside in layout.convs.items():
            ns = _predict_conversions(predicted, elements_of(beside))
            found.layout[conv, layout] = _sum(ns, ("reorder", "transpose"))
    return found


def _add_conversions(
    costs: _Costs,
    gm: GraphModule,
    predicted: _Predicted,
    read: Node,
    node: Node,
    kept: Container[Node],
) -> None:
    """Add the conversions of what an operator reads through a dequantize.

    Args:
        costs: what is written.
        gm: the graph.
        predicted: the times of work.
        read: the dequantize.
        node: the operator.
        kept: operators with a layout that is chosen by itself.
    """
    real = real_of(read)
    if real is None:
        return
    source, elements = behind_clips(gm, real), elements_of(real)
    ns = _predict_conversions(predicted, elements)
    is_free = source in kept, node in kept
    costs.quantize[source] = _conversion("quantize", source, node, ns, is_free=is_free)
    costs.dequantize[source, node] = _conversion("dequantize", node, source, ns, is_free=is_free)
    if is_call(node, MAX_POOL2D):
        # Fast only with channels last, as convolutions in integers leave them.
        pool = predicted(_of_elements("max_pool2d", elements))
        costs.enter[source, node] = pool.get("integer", 0.0)


def _predict_conversions(predicted: _Predicted, elements: int) -> dict[str, float]:
    """Nanoseconds by conversion; single changes of layout, differences of larger times, scatter."""
    return predicted(_of_elements("convert", elements), among=_CONVERSIONS)


def _forms(node: Node, reads: Sequence[Node], predicted: _Predicted) -> tuple[float, float]:
    """Times of an operator in integers and in float; float is endless where it is not judged."""
    if not all(map(_is_judged, reads)):
        return 0.0, math.inf
    if is_call(node, PERMUTE) and node.meta["val"].dim() == _SHUFFLED:
        ns = predicted(_of_elements("shuffle", elements_of(node)))
        return ns.get("integer", 0.0), ns.get("float", 0.0)
    if is_call(node, MOVES):
        return 0.0, 0.0
    work = work_of(node)
    ns = predicted(work) if work is not None else {}
    # A linear gives floats as fast as integers; other results are rounded, or are not integers.
    if not ns or not (is_call(node, LINEAR) or is_rounded(node)):
        return 0.0, math.inf
    return ns["integer"], ns["float"]


def _is_judged(dequantize: Node) -> bool:
    """True for 8 bits with a scale from calibration."""
    codes = dequantize.args[0]
    is_byte = isinstance(codes, Node) and codes.meta["val"].dtype in BYTES
    return is_byte and not any(isinstance(arg, Node) for arg in dequantize.args[1:])


def _of_elements(kind: str, elements: int) -> Work:
    """The work on so many elements; 0 where their number is not known."""
    return Work(kind, (max(elements, 1),), elements)


def _conversion(
    form: str, floating: Node, integer: Node, ns: Mapping[str, float], *, is_free: tuple[bool, bool]
) -> float:
    """Nanoseconds of a conversion, with what convolutions beside it pay to change layouts."""
    found = ns.get(form, 0.0) + _CALL_NS
    if any(is_free):
        return found
    sides = ((floating, "reorder"), (integer, "transpose"))
    return found + _sum(ns, (layout for node, layout in sides if is_call(node, CONVS)))


def _sum(ns: Mapping[str, float], layouts: Iterable[str]) -> float:
    """Nanoseconds of some changes of layout."""
    return sum(ns[one] + _CALL_NS for one in layouts if one in ns)


def _cut(costs: _Costs) -> set[_Place]:
    """The operators on the float side of a minimum cut.

    An operator whose form wins by more than all conversions around it is in that form in every
    cheapest choice. The others are few, and parts of them that nothing joins are cut by themselves.
    """
    import networkx as nx  # takes a fifth of a second

    around: dict[_Place, float] = defaultdict(float)
    for (source, reader), cost in costs.dequantize.items():
        for node in (source, reader):
            around[node] += cost + costs.quantize[source] + costs.enter.get((source, reader), 0.0)
    for (conv, layout), cost in costs.layout.items():
        around[conv] += cost
        around[layout] += cost
    floats = {source for source in costs.quantize if source not in costs.integer}
    floats |= {conv for conv, _ in costs.layout if conv not in costs.integer}
    integers = set()
    for node, integer in costs.integer.items():
        if integer + around[node] < costs.floating[node]:
            integers.add(node)
        elif costs.floating[node] + around[node] < integer:
            floats.add(node)
    network = _network(costs, integers, floats)
    for part in _parts(network):
        flow = nx.algorithms.flow.boykov_kolmogorov
        _, (_, found) = nx.minimum_cut(part, _INTEGERS, _FLOATS, flow_func=flow)
        floats |= found
    return floats & set(costs.integer)


def _network(costs: _Costs, integers: set[_Place], floats: set[_Place]) -> "nx.DiGraph":
    """What the open operators cost on either side; conversions of the others are known."""
    import networkx as nx

    found = nx.DiGraph()

    def end(node: Any) -> Any:
        return _INTEGERS if node in integers else _FLOATS if node in floats else node

    def join(one: Any, other: Any, cost: float) -> None:
        if end(one) != end(other) and end(one) != _FLOATS and end(other) != _INTEGERS and cost:
            before = found.get_edge_data(end(one), end(other), {"capacity": 0.0})
            found.add_edge(end(one), end(other), capacity=before["capacity"] + cost)

    for node, integer in costs.integer.items():
        join(_INTEGERS, node, costs.floating[node])
        join(node, _FLOATS, integer)
    for source, cost in costs.quantize.items():
        # On the side of integers if a reader is.
        join(_Quantized(source), source, cost)
    for (source, reader), cost in costs.dequantize.items():
        join(source, reader, cost)
        join(reader, _Quantized(source), math.inf)
    for (source, reader), cost in costs.enter.items():
        join(reader, source, cost)
    for (conv, layout), cost in costs.layout.items():
        join(conv, layout, cost)
        join(layout, conv, cost)
    return found


def _parts(network: "nx.DiGraph") -> Iterator["nx.DiGraph"]:
    """The parts of a network that only its two ends join."""
    import networkx as nx

    ends = {_INTEGERS, _FLOATS}
    inner = network.subgraph(n for n in network if n not in ends)
    for part in nx.weakly_connected_components(inner):
        found = network.subgraph(part | ends).copy()
        found.add_nodes_from(ends)
        found.remove_edges_from([(_INTEGERS, _FLOATS)])
        yield found


def _islands(costs: _Costs, floats: set[_Place]) -> list[set[_Place]]:
    """The operators that could be integers and are not to be, in connected parts."""
    import networkx as nx

    graph = nx.Graph()
    graph.add_nodes_from(n for n in costs.integer if n in floats)
    edges = (*costs.dequantize, *costs.layout)
    graph.add_edges_from(edge for edge in edges if floats.issuperset(edge))
    parts = nx.connected_components(graph)
    return [part for part in parts if any(map(costs.is_chosen, part))]


def _total(costs: _Costs, island: set[_Place], floats: set[_Place]) -> float:
    """Nanoseconds of an island and its borders, with some of it in float and all else as it is."""

    def is_integer(node: _Place) -> bool:
        return not math.isinf(costs.integer.get(node, math.inf)) and node not in floats

    total = sum(costs.integer[n] if is_integer(n) else costs.floating[n] for n in island)
    sources = (source for node in island for source in (node, *costs.sources[node]))
    for source in dict.fromkeys(sources):
        readers = [r for r in costs.readers[source] if source in island or r in island]
        if is_integer(source):
            total += sum(costs.dequantize[source, r] for r in readers if not is_integer(r))
        elif any(map(is_integer, readers)):
            total += costs.quantize[source]
            total += sum(costs.enter.get((source, r), 0.0) for r in readers if is_integer(r))
    pairs = dict.fromkeys(pair for node in island for pair in costs.beside.get(node, ()))
    return total + sum(costs.layout[p] for p in pairs if is_integer(p[0]) != is_integer(p[1]))
