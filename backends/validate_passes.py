"""Translation validation: compare every value before and after each pass, on several calls.

The graph runs before and after each pass, on the sample, on fresh data and on extreme inputs, and
every value that has kept its name, dtype and shape is compared. So the pass and the first value
that it changed are known, where a run of the artifact shows only that its result is wrong.
`backends/onnx/validate_rewrites.py` does the same behind the export to ONNX.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from pt2e_quant.backends.compare_results import compare
from pt2e_quant.backends.gate import choose_sample
from pt2e_quant.backends.judge_results import CEILING_DB, FLOOR_DB
from pt2e_quant.backends.rounding_noise import DRAWS, NoisyInterpreter
from pt2e_quant.backends.sample_run import copied_leaves
from pt2e_quant.backends.trial_data import extreme_calls, fresh_call
from pt2e_quant.backends.trial_sizes import sizes_of
from pt2e_quant.core.errors import InvariantError
from pt2e_quant.core.one_thread import one_thread
from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.flow.calibrate.calibrate import preserve_buffers
from pt2e_quant.flow.calibrate.input_ranges import input_ranges
from pt2e_quant.flow.calibrate.sample import Sample
from pt2e_quant.graph.random_draws import draws, reached

MARGIN_DB = 3.0
"""The margin over the furthest run with rounding noise that a value may have."""

RESULT = "result "
"""The prefix of the names of results among the values; an index follows."""

Values: TypeAlias = dict[str, Tensor]


class PassValidation:
    """Compares a graph with itself after each pass; `run_passes` calls it.

    Args:
        gm: the canonical graph, which no pass changes: rounding noise is measured on it.
        sample: a call.
    """

    def __init__(self, gm: GraphModule, sample: Sample) -> None:
        self.gm = gm
        self.calls = _calls(gm, sample)
        self.more: tuple[Tensor, ...] = ()
        """Leaves of inputs that the passes' graph has behind the canonical graph's."""
        self.values: list[Values | None] = []
        """The values of each call in the graph as it was last; None where it refuses the call."""

    def start(self, gm: GraphModule) -> None:
        """Run the graph that the first pass gets."""
        self.values = [self._run(gm, leaves) for _, leaves in self.calls]

    def after(self, name: str, gm: GraphModule) -> None:
        """Run the graph that a pass leaves, and compare.

        Raises:
            InvariantError: naming the pass and the first value that it changed.
        """
        nodes = {node.name: node for node in gm.graph.nodes}
        for at, (label, leaves) in enumerate(self.calls):
            before = self.values[at]
            if before is None:
                continue
            found = self._run(gm, leaves)
            if found is None:
                raise InvariantError(f"{name} leaves a graph that cannot be called with {label}")
            bound = partial(self.bound_db, at)
            check_values(f"the pass {name}", label, before, found, bound, nodes)
            self.values[at] = found

    def bound_db(self, at: int, key: str, ratio: float) -> float:
        """The required SQNR of a value; lower where noise moves the canonical graph too."""
        least = CEILING_DB
        plain = self._run(self.gm, self.calls[at][1])
        if plain is None or key not in plain:
            return FLOOR_DB
        for draw in range(DRAWS):
            noisy = self._run(self.gm, self.calls[at][1], draw=draw)
            if noisy is not None and _is_alike(plain[key], noisy[key]):
                own = compare(plain[key].double(), noisy[key].double()).ratio_db
                least = min(least, (-math.inf if math.isnan(own) else own) - MARGIN_DB)
            if least <= ratio:
                break
        return least

    def _run(
        self, gm: GraphModule, leaves: Sequence[Any], *, draw: int | None = None
    ) -> Values | None:
        """Every tensor that a graph computes without random numbers; None where it raises."""
        given = copied_leaves(leaves)
        count = sum(node.op == "placeholder" for node in gm.graph.nodes)
        given += copied_leaves(self.more[: count - len(given)])
        recorder = _Recorder(gm) if draw is None else _NoisyRecorder(gm, draw)
        with torch.no_grad(), one_thread(), preserve_buffers(gm, capture_of(gm)):
            try:
                results = recorder.run(*given, enable_io_processing=False)
            except Exception:  # Whatever a graph raises at an extreme input: nothing to compare.
                return None
        drawn = {node.name for node in reached(gm.graph, draws)}
        leaves_out = pytree.tree_leaves(gm.graph.output_node().args[0])
        for index, (value, leaf) in enumerate(
            zip(pytree.tree_leaves(results), leaves_out, strict=True)
        ):
            if isinstance(value, Tensor) and getattr(leaf, "name", None) not in drawn:
                recorder.values[f"{RESULT}{index}"] = value.clone()
        return {key: value for key, value in recorder.values.items() if key not in drawn}


class _Recorder(Interpreter):
    """Keeps every tensor that a graph computes, as it was then: a later node may write into it."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm)
        self.values: Values = {}

    def run_node(self, n: Node) -> Any:
        """Run one node and keep its result."""
        value = super().run_node(n)
        _keep(self.values, n, value)
        return value


class _NoisyRecorder(NoisyInterpreter):
    """Keeps every value of a run with rounding noise."""

    def __init__(self, gm: GraphModule, draw: int) -> None:
        super().__init__(gm, draw)
        self.values: Values = {}

    def run_node(self, n: Node) -> Any:
        """Run one node and keep its result with noise."""
        value = super().run_node(n)
        _keep(self.values, n, value)
        return value


def check_values(
    change: str,
    label: str,
    before: Values,
    found: Values,
    bound_db: Callable[[str, float], float],
    nodes: Mapping[str, Node],
) -> None:
    """Compare every value that kept its name, dtype and shape.

    Args:
        change: what was changed in between, for the error.
        label: which call it is.
        before: the values of the call before the change, in the order of the graph.
        found: those behind it.
        bound_db: the least SQNR of a value, given its name and the SQNR that it has.
        nodes: of the values, for the error.

    Raises:
        InvariantError: naming the change and the first value that differs.
    """
    for key, expected in before.items():
        value = found.get(key)
        if value is None or not _is_alike(expected, value):
            if not key.startswith(RESULT):
                continue
            text = "is not there" if value is None else "has another shape or dtype"
            raise InvariantError(f"{change} changes the graph: {key} {text} any more")
        difference = compare(expected.double(), value.double())
        ratio = -math.inf if math.isnan(difference.ratio_db) else difference.ratio_db
        if ratio < CEILING_DB and ratio < (bound := bound_db(key, ratio)):
            raise InvariantError(
                f"{change} changes {key}: SQNR {ratio:.1f} dB between the graph before "
                f"it and behind it, expected at least {bound:.1f} dB, with {label}"
                f"{f' ({difference.problem})' if difference.problem else ''}",
                node=nodes.get(key),
                fix="leave this operator float; validate=False skips this check, and the "
                "artifact is still held against its graph",
            )


def validation_of(
    validate: bool, gm: GraphModule, example_inputs: Sequence[Any] | None
) -> PassValidation | None:
    """The validation of a lowering's passes, None if it is not asked for."""
    return PassValidation(gm, choose_sample(gm, example_inputs)) if validate else None


def _keep(values: Values, node: Node, value: Any) -> None:
    if node.op == "call_function" and isinstance(value, Tensor) and _is_plain(value):
        values[node.name] = value.detach().clone()


def _is_plain(value: Tensor) -> bool:
    """No weight packed for oneDNN, which cannot be copied, and no complex number."""
    return not value.is_complex() and not value.is_mkldnn


def _is_alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


def _calls(gm: GraphModule, sample: Sample) -> list[tuple[str, Sequence[Any]]]:
    """The sample, fresh data, and extreme inputs, with a label each."""
    capture = capture_of(gm)
    ranges = input_ranges(gm, sample.leaves)
    found: list[tuple[str, Sequence[Any]]] = [("the sample", sample.leaves)]
    sizes = sizes_of(capture, sample.leaves)
    if sizes is not None:
        fresh = fresh_call(capture, sample.leaves, ranges, sizes, seed=1)
        found += [] if fresh is None else [("fresh data", fresh)]
    return [*found, *extreme_calls(sample.leaves, ranges)]
