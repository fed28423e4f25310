"""Calibrate and optimise a prepared graph block by block, so that one block is in memory."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from pt2e_quant.core.capture import Capture
from pt2e_quant.core.errors import CalibrationError, ConfigError, InputError, UnsupportedError
from pt2e_quant.core.progress import show_progress
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.flow.calibrate.block_state import BlockState, Progress
from pt2e_quant.flow.calibrate.calibrate import (
    calibrate,
    check_batches,
    check_finite,
    checked_call,
    preserve_buffers,
)
from pt2e_quant.flow.calibrate.input_ranges import note_ranges
from pt2e_quant.flow.calibrate.name_stops import naming_stops
from pt2e_quant.flow.calibrate.pick_inputs import InputPick
from pt2e_quant.flow.calibrate.sample import SAMPLE_KEY, Sample, copied
from pt2e_quant.flow.prepare.prepared import observers_of, prepared_state
from pt2e_quant.graph.meta import attribute
from pt2e_quant.graph.pipeline import log_passes, run_passes
from pt2e_quant.graph.subgraphs import bodies
from pt2e_quant.observers.rounding import rounded
from pt2e_quant.observers.statistics.base import Statistics
from pt2e_quant.passes.algorithms.algorithm import Algorithm, as_pass, take_statistics
from pt2e_quant.passes.algorithms.algorithm_graph import has_value
from pt2e_quant.passes.algorithms.paired_run import blocks, fixed_nodes
from pt2e_quant.passes.recurrent.round_recurrent import as_rounded


def calibrate_by_block(
    prepared: GraphModule,
    batches: Iterable[Any],
    *,
    inputs: InputPick | None = None,
    resume: str | Path | None = None,
    progress: bool = True,
) -> GraphModule:
    """Run batches through a prepared graph block by block, and apply its algorithms to each.

    A block ends wherever only one value is read later: at a sum of a residual stream, or between
    layers. The batches run through a block, its algorithms change it by their statistics, and the
    batches run through it again with rounded weights to make the inputs of the next block. So
    statistics are taken behind quantized blocks, as in GPTQ, and memory holds those of one block
    and its inputs. Activations stay float.

    Algorithms that ask for whole calls (AdaRound and its kin) stream by themselves, in convert.

    Args:
        prepared: of `prepare_pt2e`.
        batches: as `calibrate` takes them; kept until the end.
        inputs: likewise.
        resume: a folder for the state of each block that is done. A run that was stopped goes on
            after its last whole block when it is started again with the same model, data and
            settings.
        progress: show a progress bar on a terminal.

    Returns:
        The graph, calibrated: another object than `prepared` where a run was resumed.

    Raises:
        InputError: a batch does not fit the captured graph.
        CalibrationError: there is no batch, or an operator cannot take one.
        UnsupportedError: the graph has control flow, or resume is given and a file cannot hold the
            graph.
        ConfigError: an algorithm asks for whole calls and has to run before one that does not.
        ArtifactError: the folder holds the state of another run.
    """
    _drop_unasked(prepared)
    streamed = _streamed(prepared_state(prepared).algorithms)
    capture, calls = capture_of(prepared), _calls(prepared, batches, inputs)
    prepared.meta[SAMPLE_KEY] = _sample(prepared, capture, calls[0])
    ends = [block.output.name for block in blocks(prepared)[:-1]]
    kept = None if resume is None else BlockState(Path(resume), prepared, calls)
    done = kept.progress if kept is not None else None
    if kept is not None and done is not None:
        prepared, ends = kept.graph(done), list(done.ends)
    run = _BlockRun(prepared, capture, calls, ends)
    waiting = range(0 if done is None else done.blocks, len(ends) + 1)
    run.skip(waiting.start if waiting else 0)
    for number in show_progress(waiting, "calibrating blocks", enabled=progress):
        _optimise(run, number, streamed)
        if kept is not None:
            kept.save(prepared, Progress(blocks=number + 1, ends=tuple(ends)))
    state = prepared_state(prepared)
    state.algorithms = tuple(a for a in state.algorithms if a.needs_calls)
    return prepared


def run_calibration(
    prepared: GraphModule,
    batches: Iterable[Any] | None,
    resume: str | Path | None,
    *,
    inputs: InputPick | None = None,
    progress: bool = True,
) -> GraphModule:
    """Run batches through a prepared graph, block by block if a folder keeps the state.

    Args:
        prepared: of `prepare_pt2e`.
        batches: None for recipes that need none: the graph is returned as it is.
        resume: a folder as `calibrate_by_block` takes it; None for `calibrate`.
        inputs: as both take them.
        progress: show a progress bar on a terminal.

    Raises:
        InputError: a folder and no batches.
    """
    if batches is None and resume is not None:
        raise InputError(
            "resume keeps the state of calibration, and there is no calibration data",
            fix="leave resume out, or give data",
        )
    if batches is None:
        return prepared
    if resume is None:
        return calibrate(prepared, batches, inputs=inputs, progress=progress)
    return calibrate_by_block(prepared, batches, resume=resume, inputs=inputs, progress=progress)


def _calls(gm: GraphModule, batches: Iterable[Any], inputs: InputPick | None) -> list[list[Any]]:
    """The leaves of all batches; their ranges are noted."""
    check_batches(batches)
    if body := next(iter(bodies(gm)), None):
        raise UnsupportedError(
            "a graph with control flow has no blocks to be calibrated one by one",
            node=body.call,
            fix="calibrate(prepared, batches)",
        )
    capture = capture_of(gm)
    calls = [checked_call(capture, b, inputs, index) for index, b in enumerate(batches)]
    if not calls:
        raise CalibrationError(
            "the calibration data is empty: no batch was run", fix="give at least one batch"
        )
    for call in calls:
        note_ranges(gm, call)
    return calls


_LEFT_OUT = {
    "choose_ranges": "ranges are as observed",
    "block_gptq": "weights are rounded plainly",
    "keep_float": "no layer is left float for its own rounding",
    "bias_correction": "biases are as they are",
}


def _drop_unasked(gm: GraphModule) -> None:
    """Leave out a recipe's own choices of ranges and of integers: they run whole models."""
    state = prepared_state(gm)
    own = (a for a in state.algorithms if a.is_left_to_data)
    left = [a for a in own if a.name not in state.asked_algorithms]
    if left:
        state.algorithms = tuple(a for a in state.algorithms if a not in left)
        told = " and ".join(_LEFT_OUT.get(a.name, f"without {a.name}") for a in left)
        provenance_of(gm).notes.append(
            f"{told}: block by block, others are compared only where an effort is asked for"
        )


def _streamed(algorithms: Sequence[Algorithm]) -> tuple[Algorithm, ...]:
    """The algorithms that run block by block; the others run in convert, after them."""
    found = tuple(a for a in algorithms if not a.needs_calls)
    for later in (a for a in algorithms if a.needs_calls):
        for earlier in found:
            if later.stage < earlier.stage:
                raise ConfigError(
                    f"{later.name} runs on whole calls, and has to run before {earlier.name}, "
                    "which runs block by block",
                    fix=f"calibrate(prepared, batches), or leave out {later.name}",
                )
    return found


def _optimise(run: "_BlockRun", number: int, algorithms: Sequence[Algorithm]) -> None:
    """Observe one block, apply the algorithms to it, and run it rounded."""
    gm, nodes = run.gm, frozenset(run.nodes(number))
    run.observe(number)
    gathered = take_statistics(gm, prepared_state(gm).algorithms, nodes)
    run.renew_statistics()
    passes = [as_pass(algorithm, gathered, nodes) for algorithm in algorithms]
    log_passes(provenance_of(gm), run_passes(gm, passes))
    if run.changed_before(number):
        run.skip(number)
    run.advance(number)


def _sample(gm: GraphModule, capture: Capture, call: Sequence[Any]) -> Sample:
    """A call with the outputs of the float model."""
    run = _BlockRun(gm, capture, [call], [])
    return Sample.keep(call, run.float_outputs())


class _BlockRun:
    """The batches, and the values that go from the blocks that are done to those that are not.

    Args:
        gm: prepared; nodes may come and go between calls, but not those that blocks end with.
        capture: of the graph.
        calls: the inputs of each batch, in placeholder order.
        ends: the names of the last nodes of all blocks but the last.
    """

    def __init__(
        self,
        gm: GraphModule,
        capture: Capture,
        calls: Sequence[Sequence[Any]],
        ends: Sequence[str],
    ) -> None:
        by_name = {node.name: node for node in gm.graph.nodes}
        self.gm = gm
        self._capture = capture
        self._calls = calls
        self._ends: list[Node | None] = [*(by_name[name] for name in ends), None]
        self._live: list[dict[Node, Any]] = [{} for _ in calls]
        self._used: dict[str, int] = {}
        self._fresh: dict[str, Statistics] = {}

    def nodes(self, number: int) -> list[Node]:
        """The nodes of a block, in graph order.

        What watches its last value belongs to it; statistics of that to the next block too.
        """
        found = list(self.gm.graph.nodes)
        end, before = self._ends[number], self._ends[number - 1] if number else None
        first = 0 if before is None else found.index(before) + 1
        last = len(found) if end is None else found.index(end) + 1 + len(_watchers(end))
        seen = () if before is None else _watchers(before)
        return [
            node
            for node in found[first:last]
            if node.op == "call_function"
            or (node.op == "call_module" and (node not in seen or self._is_statistics(node)))
        ]

    def skip(self, number: int) -> None:
        """Begin anew, and run the first blocks rounded, as they are now."""
        self._live, self._used = [{} for _ in self._calls], {}
        for index in range(number):
            self.advance(index)

    def observe(self, number: int) -> None:
        """Run a block in float for its observers and statistics."""
        nodes, constants = self._to_run(number), self._constants(number, is_rounded=False)
        end = self._ends[number]
        self._fresh = {
            str(node.target): copy.deepcopy(attribute(self.gm, str(node.target)))
            for node in (() if end is None else _watchers(end))
            if self._is_statistics(node)
        }
        with torch.no_grad(), preserve_buffers(self.gm, self._capture):
            for index, live in enumerate(self._live):
                values = self._start(index, constants | live)
                self._run(nodes, values, index, observes=True)
                self._check_finite(nodes, index)

    def renew_statistics(self) -> None:
        """Let those that the next block needs too begin anew, with this block rounded."""
        for name, fresh in self._fresh.items():
            if attribute(self.gm, name) is not None:
                self.gm.set_submodule(name, fresh)

    def advance(self, number: int) -> None:
        """Run a block with its weights rounded, and keep what later blocks read."""
        nodes, constants = self._to_run(number), self._constants(number, is_rounded=True)
        done = {*nodes, *(n for live in self._live[:1] for n in live)}
        own = {n for block in range(number + 1) for n in self.nodes(block)}
        own = {node for node in own if not self._is_statistics(node)}
        kept = [n for n in done if any(user not in own for user in n.users)]
        with torch.no_grad(), preserve_buffers(self.gm, self._capture):
            for index, live in enumerate(self._live):
                values = self._start(index, constants | live)
                self._run(nodes, values, index, observes=False)
                self._live[index] = {node: values[node] for node in kept}

    def float_outputs(self) -> list[Any]:
        """The float model's outputs for the first batch, without observers."""
        with torch.no_grad(), preserve_buffers(self.gm, self._capture):
            values = self._start(0, {})
            calls = ("call_function", "call_module")
            self._run([n for n in self.gm.graph.nodes if n.op in calls], values, 0, observes=None)
            result = next(iter(self.gm.graph.find_nodes(op="output"))).args[0]
            return pytree.tree_leaves(map_arg(result, lambda n: self._value(n, values)))

    def changed_before(self, number: int) -> bool:
        """True if a constant that an earlier block has read is another now."""
        if number == 0:
            return False
        return any(id(attribute(self.gm, name)) != held for name, held in self._used.items())

    def _to_run(self, number: int) -> list[Node]:
        fixed = fixed_nodes(self.gm.graph)
        return [node for node in self.nodes(number) if node not in fixed]

    def _start(self, index: int, values: Mapping[Node, Any]) -> dict[Node, Any]:
        given = self.gm.graph.find_nodes(op="placeholder")
        return dict(values) | dict(zip(given, copied(self._calls[index]), strict=True))

    def _constants(self, number: int, *, is_rounded: bool) -> dict[Node, Any]:
        """The values of constants that a block reads, behind their observers."""
        fixed, values = fixed_nodes(self.gm.graph), dict[Node, Any]()
        read = [n for node in self._to_run(number) for n in node.all_input_nodes if n in fixed]
        wanted = set(read)
        for node in read:
            wanted |= _ancestors(node)
        with torch.no_grad():
            for node in self.gm.graph.nodes:
                if node not in wanted:
                    continue
                values[node] = self._constant(node, values, is_rounded=is_rounded)
                if is_rounded and node.op == "get_attr":
                    self._used[str(node.target)] = id(attribute(self.gm, str(node.target)))
        return {node: values[node] for node in read}

    def _constant(self, node: Node, values: dict[Node, Any], *, is_rounded: bool) -> Any:
        observer = attribute(self.gm, str(node.target)) if node.op == "call_module" else None
        if observer is None:
            return self._compute(node, values, observes=False)
        held = values[node.all_input_nodes[0]]
        if isinstance(held, Tensor) and not has_value(observer):
            observer(held)
        return rounded(observer, held) if is_rounded else held

    def _is_statistics(self, node: Node) -> bool:
        if node.op != "call_module":
            return False
        return isinstance(attribute(self.gm, str(node.target)), Statistics)

    def _run(
        self, nodes: Iterable[Node], values: dict[Node, Any], index: int, *, observes: bool | None
    ) -> None:
        """Compute the values of nodes for a batch."""
        for node in nodes:
            with naming_stops(node, index):
                values[node] = self._compute(node, values, observes=observes)

    def _compute(self, node: Node, values: dict[Node, Any], *, observes: bool | None) -> Any:
        """The value of a node.

        Observers see what comes by, or they and recurrent layers round if they do so at run time,
        or with None do nothing.
        """
        if node.op == "get_attr":
            return attribute(self.gm, str(node.target))
        given: Any = map_arg((node.args, node.kwargs), lambda n: self._value(n, values))
        args, kwargs = given
        target: Any = node.target
        if node.op == "call_function":
            function = as_rounded(node) if observes is False else target
            return function(*args, **kwargs)
        module: Any = attribute(self.gm, str(target))
        if observes:
            return module(*args, **kwargs)
        is_dynamic = getattr(module, "is_dynamic", False) and not isinstance(module, Statistics)
        return rounded(module, args[0]) if is_dynamic and observes is False else args[0]

    def _value(self, node: Node, values: dict[Node, Any]) -> Any:
        if node.op == "get_attr" and node not in values:  # a buffer that the model writes
            return attribute(self.gm, str(node.target))
        return values[node]

    def _check_finite(self, nodes: Sequence[Node], index: int) -> None:
        within = set(nodes)
        check_finite((pair for pair in observers_of(self.gm) if pair[0] in within), index)


def _watchers(end: Node) -> list[Node]:
    """The observers and statistics that stand right behind a value."""
    found, node = [], end.next
    while node.op == "call_module":
        found.append(node)
        node = node.next
    return found


def _ancestors(node: Node) -> set[Node]:
    """All that a node is computed from."""
    found: set[Node] = set()
    waiting = list(node.all_input_nodes)
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += one.all_input_nodes
    return found
