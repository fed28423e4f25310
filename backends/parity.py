"""Compare an artifact with the integer reference, value by value and in steps."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.backends.artifact import Artifact
from pt2e_quant.backends.behind_floats import (
    as_given,
    given_behind,
    quantized_floats,
    run_given,
)
from pt2e_quant.backends.cut_graph import cut_behind, values_to_compare, with_values
from pt2e_quant.backends.parity_table import NodeParity, Parity
from pt2e_quant.backends.registry import get, names
from pt2e_quant.backends.run_time_codes import Probe, probe, run_time_inputs
from pt2e_quant.backends.sample_run import copied_leaves, run_graph
from pt2e_quant.backends.target.backend import Backend
from pt2e_quant.backends.target.leave_slower import IN_FLOAT
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.integer_ops.profiles import Profile, profile_named
from pt2e_quant.core.qdq import is_dequantize, read_qparams
from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.core.recurrent_ops import RecurrentLayer
from pt2e_quant.flow.calibrate.pick_inputs import InputPick, bind_batch
from pt2e_quant.flow.calibrate.sample import Sample
from pt2e_quant.flow.convert.integer_reference import integer_reference
from pt2e_quant.graph.op_table import ALLOWED_KEY, SLOWER, operator_name
from pt2e_quant.passes.reference.read_sites import reads_integers

_PROFILES = {"xnnpack": "xnnpack", "onnx": "onnxruntime_x86", "cpu": "onednn", "cuda": "triton"}
"""Whose rounding the runtime of a backend has."""


def verify_parity(
    artifact: Artifact,
    batches: Iterable[Any],
    *,
    quantized: GraphModule | None = None,
    profile: Profile | str | None = None,
    most_nodes: int = 8,
    inputs: InputPick | None = None,
) -> Parity:
    """Compare an artifact with the integer reference of the graph that it was lowered from.

    Operators that the artifact computes in float are float in the reference. What stands in front
    of a quantized tensor is lowered by itself and run; the last one is read off the artifact where
    the program returns it.

    Args:
        artifact: of a backend's `lower`.
        batches: inputs, as `calibrate` takes them.
        quantized: the graph of `convert_pt2e`, which is not changed; by default the one that the
            artifact was lowered from. A .pte or .onnx that was loaded from a file has none.
        profile: how the target rounds; by default as the artifact's runtime does.
        most_nodes: how many tensors are compared, spread over the graph; the last always is.
        inputs: what of each batch the model takes, as `calibrate` has it.

    Raises:
        ConfigError: no registered backend made the artifact, its graph is not known, there is no
            batch, or no value of the graph is quantized by constant scales.
    """
    backend = backend_of(artifact)
    given = _lowered_graph(artifact, quantized, backend)
    rounding = profile_named(profile or _PROFILES.get(backend.name, "default"))
    quantized = artifact.as_run(given)
    unrounded = _unrounded(given, quantized)
    at_run_time = run_time_inputs(quantized)
    readable = set({n.args[0]: n for n, why in at_run_time.items() if why is None}.values())
    static = _static_values(quantized)
    values = [node for node in quantized.graph.nodes if node in static or node in readable]
    calls = _calls(quantized, batches, inputs)
    if not values:
        raise _nothing_to_compare(at_run_time, unrounded)
    floats = artifact.float_operators(quantized)
    slower = tuple(r.node for r in artifact.report.float_regions if r.what == IN_FLOAT)
    returned = quantized.graph.output_node().all_input_nodes
    compared = []
    for value in _spread(values, most_nodes):
        ending = probe(quantized, value) if value in readable else None
        part = cut_behind(quantized, value.name) if ending is None else ending.gm
        if not slower:
            part.meta[ALLOWED_KEY] = {*part.meta.get(ALLOWED_KEY, ()), SLOWER}
        behind = [name for name in quantized_floats(part, floats) if name != value.name]
        wide, _ = with_values(part, behind)
        whole = artifact if returned == [value] else None
        lowered = whole if whole and not behind else backend.lower(wide, verify=False, strict=False)
        made = _Part(part, ending, whole or lowered, lowered, behind)
        compared.append(_compare(value, made, calls, rounding))
    return Parity(
        profile=rounding.name,
        nodes=tuple(found.node for found in compared),
        integers=tuple(found.integers for found in compared if found.integers is not None),
        of_floats=tuple({row.node: row for found in compared for row in found.of_floats}.values()),
        floats=_between(quantized, floats),
        slower=slower,
        not_compared=(*_left_out(quantized, at_run_time, readable), *unrounded),
    )


def _lowered_graph(
    artifact: Artifact, quantized: GraphModule | None, backend: Backend
) -> GraphModule:
    """Return the graph that an artifact was lowered from, which its file does not hold."""
    found = artifact.quantized if quantized is None else quantized
    if found is None:
        raise ConfigError(
            f"this artifact does not hold the graph that it was lowered from: a {backend.suffix} "
            "file has the runtime's program alone",
            fix="give the graph of convert_pt2e: verify_parity(artifact, batches, "
            "quantized=graph); pt2e_quant.save keeps one",
        )
    return found


def _between(gm: GraphModule, floats: Set[str]) -> tuple[str, ...]:
    """Those of the operators in float that read integers."""
    return tuple(n.name for n in gm.graph.nodes if n.name in floats and reads_integers(n))


def _calls(gm: GraphModule, batches: Iterable[Any], inputs: InputPick | None) -> list[Sample]:
    """The batches as a graph takes them.

    Raises:
        ConfigError: there is none.
    """
    capture = capture_of(gm)
    calls = [
        Sample.keep(bind_batch(capture, batch, inputs, call="verify_parity"), None)
        for batch in batches
    ]
    if not calls:
        raise ConfigError("parity needs at least one batch", fix="give calibration batches")
    return calls


def _static_values(gm: GraphModule) -> set[Node]:
    """A dequantize of each tensor with constant scales; the last one, which a result may be."""
    found = [node for node in values_to_compare(gm) if is_dequantize(node)]
    return set({node.args[0]: node for node in found}.values())


def _unrounded(given: GraphModule, as_run: GraphModule) -> tuple[tuple[str, str], ...]:
    """The tensors of a graph that its program does not round, and why they are not compared."""
    kept = {node.name for node in as_run.graph.nodes}
    static = _static_values(given)
    makers = [_maker(n).name for n in given.graph.nodes if n in static and n.name not in kept]
    reason = "the program computes it in float and does not round it, nor does the reference"
    return tuple((name, reason) for name in dict.fromkeys(makers))


def _left_out(
    gm: GraphModule, at_run_time: Mapping[Node, str | None], readable: set[Node]
) -> tuple[tuple[str, str], ...]:
    read = {node.args[0] for node in readable}
    found = {
        node.args[0]: (_maker(node).name, why)
        for node, why in at_run_time.items()
        if why is not None and node.args[0] not in read
    }
    inside = "it rounds its input and its states inside"
    layers = [(node.name, inside) for node in gm.graph.nodes if node.target is RecurrentLayer]
    return (*found.values(), *layers)


def _nothing_to_compare(
    at_run_time: Mapping[Node, str | None], unrounded: Sequence[tuple[str, str]]
) -> ConfigError:
    """Why a graph has no tensor of integers that could be compared."""
    if unrounded:
        return ConfigError(
            f"parity is of integers, and the program computes in float: {unrounded[0][0]} and all "
            "else that this graph rounds has more bits than its runtime has kernels for",
            fix='activations of 8 bits, or a backend that runs 16: pq.backends.get("onnx")',
        )
    if not at_run_time:
        return ConfigError(
            "parity is of quantized activations, and this graph has none",
            fix="a static or dynamic recipe: its activations are integers",
        )
    node, reason = next(iter(at_run_time.items()))
    return ConfigError(
        "parity cannot read the integers of this graph: their scales are chosen at run time, and "
        f"of {_maker(node).name} {reason}",
        fix='quantizer.remove_algorithm("run_time_scales") before prepare keeps calibrated scales',
    )


def backend_of(artifact: Artifact) -> Backend:
    """The registered backend that made an artifact.

    Raises:
        ConfigError: none did.
    """
    for name in names():
        backend = get(name)
        if artifact.report.backend in (backend.name, backend.table.backend):
            return backend
    raise ConfigError(f'no registered backend made an artifact of "{artifact.report.backend}"')


def _spread(values: list[Node], most: int) -> list[Node]:
    """At most so many values, evenly over the list; the last is one of them."""
    count = max(1, min(most, len(values)))
    return [values[(at + 1) * len(values) // count - 1] for at in range(count)]


@dataclass(frozen=True, slots=True)
class _Part:
    """The operators that end at one value.

    Args:
        gm: the graph; its only result is the value, or the product that tells its integers.
        ending: that product, None if there is none.
        whole: runs it.
        lowered: runs it, and returns what is quantized behind operators in float too.
        behind: the dequantizes of that, by name.
    """

    gm: GraphModule
    ending: Probe | None
    whole: Artifact
    lowered: Artifact
    behind: Sequence[str]


@dataclass(frozen=True, slots=True)
class _Compared:
    node: NodeParity
    integers: NodeParity | None
    of_floats: tuple[NodeParity, ...]


def _compare(value: Node, part: _Part, calls: list[Sample], profile: Profile) -> _Compared:
    gm, ending, behind = part.gm, part.ending, part.behind
    floats = part.whole.float_operators(gm)
    known, places = (gm, [0]) if ending is None else with_values(gm, [ending.scale])
    reference = _reference(known, profile, floats)
    started = _reference(given_behind(known, behind), profile, floats) if behind else None
    step = read_qparams(gm, value).scale.double() if ending is None else ending.steps.double()
    nodes = {node.name: node for node in gm.graph.nodes}
    apart: list[Tensor] = []
    integers: list[Tensor] = []
    made: dict[str, list[Tensor]] = {name: [] for name in behind}
    for sample in calls:
        found: Tensor = part.whole.run_leaves(copied_leaves(sample.leaves))[0]
        results = run_graph(reference, sample)
        apart.append(_steps(found, results, step, places, ending))
        if started is None:
            continue
        own, *others = part.lowered.run_leaves(copied_leaves(sample.leaves))
        if not torch.equal(own, found):
            started = None  # with more results it is another program
            integers, made = [], {}
            continue
        given = [as_given(gm, n, v) for n, v in zip(behind, others, strict=True)]
        results = run_given(started, sample, given)
        integers.append(_steps(own, results, step, places, ending))
        for name, theirs, ours in zip(behind, others, results[-len(behind) :], strict=True):
            if not is_dequantize(nodes[name]):
                continue  # a real value, which has no steps
            scale = read_qparams(gm, nodes[name]).scale.double()
            made[name].append((theirs.double() - ours.double()) / scale)
    is_run_time = ending is not None
    return _Compared(
        node=_row(value, apart, is_run_time),
        integers=_row(value, integers, is_run_time) if integers else None,
        of_floats=tuple(_row(nodes[n], steps, False) for n, steps in made.items() if steps),
    )


def _reference(gm: GraphModule, profile: Profile, floats: Set[str]) -> GraphModule:
    made = integer_reference(gm, profile, floats=floats)
    made.meta = dict(gm.meta)
    return made


def _steps(
    found: Tensor, results: list[Any], step: Tensor, places: list[int], ending: Probe | None
) -> Tensor:
    """The distance of a runtime's result from the reference's, in steps."""
    scale = step if ending is None else step * results[places[0]]
    steps: Tensor = (found.double() - results[0].double()) / scale
    return steps


def _row(value: Node, differences: list[Tensor], is_run_time: bool) -> NodeParity:
    steps = torch.cat([difference.round().abs().flatten() for difference in differences])
    made = _maker(value)
    return NodeParity(
        node=made.name,
        operator=operator_name(made) if made.op == "call_function" else made.op,
        share_equal=float((steps == 0).double().mean()),
        most_steps=float(steps.max()),
        is_run_time=is_run_time,
    )


def _maker(dequantized: Node) -> Node:
    """The node whose value is quantized."""
    source = dequantized.args[0]
    assert isinstance(source, Node)
    made = source.args[0]
    assert isinstance(made, Node)
    return made
