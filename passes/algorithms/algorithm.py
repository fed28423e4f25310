"""The interface of post-training quantization algorithms, and how prepare and convert run them."""

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar

from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.core.errors import module_path
from pt2e_quant.core.provenance import FloatRecord, provenance_of
from pt2e_quant.core.specs import Q_ANNOTATION_KEY
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import attribute, copy_trace
from pt2e_quant.graph.op_table import operator_name
from pt2e_quant.graph.ops import CONV, LINEAR
from pt2e_quant.graph.pipeline import HAS_VALUES, GraphPass, Note, PassResult
from pt2e_quant.observers.statistics.base import Statistics
from pt2e_quant.observers.statistics.kept_inputs import KeptCalls, KeptInputs
from pt2e_quant.passes.algorithms.algorithm_graph import OUT, AlgorithmGraph, unobserved
from pt2e_quant.passes.algorithms.gathered import Gathered
from pt2e_quant.passes.algorithms.grid import Declined

__all__ = [
    "APPLIED_KEY",
    "BARRED_KEY",
    "OUT",
    "Algorithm",
    "Site",
    "Stage",
    "WeightAlgorithm",
    "as_pass",
    "insert_statistics",
    "move_spec",
    "record_float",
    "take_statistics",
]

APPLIED_KEY = "pt2e_quant.algorithms"
"""The key of `node.meta` that holds the algorithms and slots done at an operator."""

BARRED_KEY = "pt2e_quant.barred_algorithms"
"""The key of `node.meta` with the names of the algorithms that an operator's rule leaves out."""


@dataclass(frozen=True, slots=True)
class Site:
    """One place that an algorithm works on.

    Args:
        graph: the graph that it is in.
        node: the operator.
        slot: "input", "weight" or another operand by its name in the schema, or OUT.
        plan: the result of `sites` before any site was changed; Declined if nothing is to be done.
    """

    graph: AlgorithmGraph
    node: Node
    slot: str
    plan: Any = None

    @property
    def tensor(self) -> Node:
        """The watched tensor: the operator's output where the slot is OUT, else its input."""
        return self.node if self.slot == OUT else self.graph.source(self.node)


class Stage(IntEnum):
    """When an algorithm runs; those of one stage run in the order in which they were asked for.

    Attributes:
        WEIGHTS: it changes weights, ranges of activations and the graph, and leaves what the float
            model computes as it is.
        LIMITS: it widens the scales of weights to what their integers may be.
        RANGES: it chooses the ranges of activations.
        SCALES: it chooses the scales of weights. A model takes one such algorithm.
        CODES: it chooses the integers of weights. A model takes one such algorithm.
        CORRECTIONS: it makes up for errors that quantization has made.
        CONFIRMATION: it holds what the others made against what was there before.
    """

    WEIGHTS = 0
    LIMITS = 1
    RANGES = 2
    SCALES = 3
    CODES = 4
    CORRECTIONS = 5
    CONFIRMATION = 6


class Algorithm(ABC):
    """A method that changes weights, ranges or the graph of a model to be quantized.

    A subclass is a frozen dataclass of its settings, under the names and with the defaults of its
    paper. One that needs data or corrects runs in convert, on the prepared and calibrated graph.
    Any other runs in prepare, on the annotated graph without observers.

    Attributes:
        name: as `add_algorithm` and the command line name it, lower case with underscores.
        paper: authors, year and where to find it.
        fits: what it applies to, for the error where a graph has no such thing.
        stage: when it runs.
        needs_float: it lets operators compute in float: left out of programs of integers alone.
        needs_calls: `graph.run` gives it the model's own values for a sample of the calls of
            calibration, in float and quantized. It looks at its sites in graph order.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    fits: ClassVar[str]
    stage: ClassVar[Stage] = Stage.WEIGHTS
    needs_calls: ClassVar[bool] = False
    needs_float: ClassVar[bool] = False

    @abstractmethod
    def sites(self, graph: AlgorithmGraph) -> Iterable[Site]:
        """The places that it applies to, at most one for each operator and slot."""

    def statistics(self, site: Site) -> Statistics:
        """A module that watches the site's tensor during calibration."""
        raise NotImplementedError  # never asked where `watches_sites` is False

    @abstractmethod
    def apply(self, site: Site, statistics: Statistics | None) -> str:
        """Do it at a site; returns one line of what was done, for the record.

        Args:
            site: as `sites` gave it; sites before it have been changed already.
            statistics: what was gathered, None if there was no data or none is needed.

        Raises:
            Declined: nothing is to be done here, with the reason. The graph is as it was.
        """

    @property
    def watches_sites(self) -> bool:
        """True if it gathers statistics at its sites during calibration."""
        return type(self).statistics is not Algorithm.statistics

    @property
    def needs_data(self) -> bool:
        """True if calibration gathers anything for it."""
        return self.watches_sites or self.needs_calls

    @property
    def is_left_to_data(self) -> bool:
        """True if a recipe brings it for where nobody chose the observers: efforts leave it out."""
        return self.needs_calls and not getattr(self, "any_observer", True)

    @property
    def runs_in_convert(self) -> bool:
        """True if it works on the prepared graph, with its observers."""
        return self.needs_data or self.stage in (Stage.LIMITS, Stage.RANGES, Stage.CORRECTIONS)


class WeightAlgorithm(Algorithm):
    """An algorithm that has a site at each weight in integers of a linear or convolution."""

    def sites(self, graph: AlgorithmGraph) -> Iterable[Site]:
        """Every quantized weight of a linear or convolution."""
        return (Site(graph, node, "weight") for node in graph.quantized((*LINEAR, *CONV)))


def move_spec(call: Node, old: Node, new: Node) -> None:
    """Let the annotation of an operator that reads `new` in place of `old` name `new`."""
    specs = getattr(call.meta.get(Q_ANNOTATION_KEY), "input_qspec_map", {})
    if old in specs:
        specs[new] = specs.pop(old)


def record_float(
    graph: AlgorithmGraph,
    node: Node,
    reason: str,
    *held: Tensor,
    fix: str = "",
    is_choice: bool = False,
) -> None:
    """Record an operator that computes in float because of an algorithm.

    Args:
        graph: what it is in.
        node: the operator.
        reason: which algorithm inserted it or left it float, and what for.
        held: its float constants.
        fix: what to do about that.
        is_choice: it could compute in integers.
    """
    record = FloatRecord(
        node=node.name,
        op=operator_name(node),
        module=module_path(node),
        reason=reason,
        size=sum(value.numel() * value.element_size() for value in held),
        fix=fix,
        is_choice=is_choice,
    )
    provenance_of(graph.gm).floats.append(record)


def as_pass(
    algorithm: Algorithm,
    gathered: Gathered | None = None,
    within: Container[Node] | None = None,
) -> GraphPass:
    """The pass that applies an algorithm at its sites, with a note for each.

    Args:
        algorithm: what to apply.
        gathered: what `take_statistics` gave; algorithms that run after each other share it.
        within: the operators whose sites are meant; None for all.
    """

    def edit(gm: GraphModule) -> PassResult:
        graph = AlgorithmGraph(
            gm,
            Gathered() if gathered is None else gathered,
            keeps_function=algorithm.stage is Stage.WEIGHTS,
        )
        notes = []
        for site in [s for s in _asked(algorithm, graph) if within is None or s.node in within]:
            try:
                notes.append(Note(site.node.name, _apply(algorithm, site)))
            except Declined as reason:
                notes.append(Note(site.node.name, str(reason), skipped=True))
        return PassResult(graph.editor.finish(), tuple(notes))

    return GraphPass(algorithm.name, edit, needs=(HAS_VALUES,), gives=())


def _asked(algorithm: Algorithm, graph: AlgorithmGraph) -> list[Site]:
    """The sites of an algorithm whose operators' rules do not leave it out."""
    return [
        site
        for site in algorithm.sites(graph)
        if algorithm.name not in site.node.meta.get(BARRED_KEY, ())
    ]


def _apply(algorithm: Algorithm, site: Site) -> str:
    applied = site.node.meta.setdefault(APPLIED_KEY, [])
    mark = f"{algorithm.name} {site.slot}"
    if mark in applied:
        raise Declined(f"{algorithm.name} was applied before")
    if isinstance(site.plan, Declined):
        raise site.plan
    found = site.graph.gathered.statistics.get((algorithm.name, site.node, site.slot))
    done = algorithm.apply(site, found if found is not None and found.seen else None)
    applied.append(mark)
    return done


@dataclass(frozen=True, slots=True)
class _Need:
    """Statistics that an algorithm needs: whose they are, what they watch and what watches it."""

    key: tuple[str, Node, str]
    tensor: Node
    wanted: Statistics


def _needs(gm: GraphModule, algorithms: Sequence[Algorithm]) -> Iterator[_Need]:
    """The statistics of a graph that algorithms with data need."""
    graph = AlgorithmGraph(gm, Gathered())
    inputs = gm.graph.find_nodes(op="placeholder")
    for algorithm in algorithms:
        sites = _asked(algorithm, graph) if algorithm.needs_data else []
        for site in sites if algorithm.watches_sites else ():
            key = algorithm.name, site.node, site.slot
            yield _Need(key, unobserved(site.tensor), algorithm.statistics(site))
        calls = KeptCalls()
        for given in inputs if sites and algorithm.needs_calls else ():
            yield _Need((algorithm.name, given, OUT), given, KeptInputs(calls))


def insert_statistics(gm: GraphModule, algorithms: Sequence[Algorithm]) -> set[str]:
    """Let a prepared graph gather what algorithms need; sites that need the same share it.

    Returns:
        The names of the algorithms that have sites in this graph.
    """
    there: dict[Node, list[Statistics]] = {}
    editor, needs = Editor(gm), list(_needs(gm, algorithms))
    graph = AlgorithmGraph(gm, Gathered())
    others = {a.name for a in algorithms if not a.needs_data and _asked(a, graph)}
    for need in needs:
        tensor, wanted = need.tensor, need.wanted
        watching = there.setdefault(tensor, [])
        if any(wanted.is_like(other) for other in watching):
            continue
        watching.append(wanted)
        name = editor.unique_name("statistics")
        gm.add_module(name, wanted)
        after = tensor
        while after.next.op == "placeholder":
            after = after.next
        with gm.graph.inserting_after(after):
            node = gm.graph.create_node("call_module", name)
        node.args = (tensor,)
        node.meta["val"] = tensor.meta.get("val")
        copy_trace(node, tensor)
    return others | {need.key[0] for need in needs}


def take_statistics(
    gm: GraphModule, algorithms: Sequence[Algorithm], within: Container[Node] | None = None
) -> Gathered:
    """Take the statistics out of a graph again, by algorithm, operator and slot.

    Args:
        gm: prepared.
        algorithms: those that `insert_statistics` was given, or what is left of them.
        within: the operators whose sites are meant; what others need too stays in the graph.
            None for all.
    """
    if within is not None:
        return _take_some(gm, algorithms, within)
    there: dict[Node, list[Statistics]] = {}
    for node in list(gm.graph.nodes):
        module = attribute(gm, str(node.target)) if node.op == "call_module" else None
        if isinstance(module, Statistics):
            there.setdefault(unobserved(node.all_input_nodes[0]), []).append(module)
            gm.graph.erase_node(node)
            gm.delete_submodule(str(node.target))
    if not there:
        return Gathered()
    return Gathered(
        statistics={
            need.key: found
            for need in _needs(gm, algorithms)
            for found in there.get(need.tensor, ())
            if found.is_like(need.wanted)
        }
    )


def _take_some(
    gm: GraphModule, algorithms: Sequence[Algorithm], within: Container[Node]
) -> Gathered:
    needs = list(_needs(gm, algorithms))
    stay = {algorithm.name for algorithm in algorithms if algorithm.needs_calls}
    found: dict[tuple[str, Node, str], Statistics] = {}
    for node in list(gm.graph.nodes):
        module = attribute(gm, str(node.target)) if node.op == "call_module" else None
        if not isinstance(module, Statistics):
            continue
        watched = unobserved(node.all_input_nodes[0])
        keys = [n.key for n in needs if n.tensor is watched and n.wanted.is_like(module)]
        found |= {key: module for key in keys if key[1] in within}
        if all(key[1] in within and key[0] not in stay for key in keys):
            gm.graph.erase_node(node)
            gm.delete_submodule(str(node.target))
    return Gathered(statistics=found)
