"""Time an artifact against the float program, and its parts against the same parts in float.

Both are lowered alike and called in turn. A part that is faster in float stays float.
"""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.fx import GraphModule, Node

from pt2e_quant.backends.artifact import Artifact
from pt2e_quant.backends.profile import NodeTime, WorkKind
from pt2e_quant.backends.sample_run import copied_leaves
from pt2e_quant.backends.target.in_float import computed_reads, in_float, real_of
from pt2e_quant.backends.target.leave_slower import elements_of
from pt2e_quant.backends.target.speed_classes import shape_class
from pt2e_quant.core.errors import Pt2eQuantWarning, UnsupportedError
from pt2e_quant.core.qdq import is_dequantize, is_qdq
from pt2e_quant.core.schemes import Role
from pt2e_quant.graph.ops import VIEWS, is_call

TIE = 0.03
"""Ratios this near to 1 count as equal: repeated measurements scatter by as much."""

_WARM_UP = 3
_ROUNDS = 40
_SECONDS = 3.0
"""All calls are timed so often, or for so long."""
_NAMED = 5
"""So many operators a warning names."""

_MOST = 6
"""So many classes, and so many integer regions, are tried: each trial is one more lowering."""
_WIN = 0.05
"""A part must win this share of a call's time: repeated measurements scatter by less."""
_TRIAL_ROUNDS = 60
_TRIAL_SECONDS = 2.0


def times_in_turn(
    calls: Sequence[Callable[[], object]], *, rounds: int, seconds: float = float("inf")
) -> list[list[float]]:
    """Microseconds of every call in each round; the order turns round by round.

    Args:
        calls: what is timed.
        rounds: how often each is timed, behind a few calls that warm up.
        seconds: no round begins later than that, but three do.
    """
    found: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + seconds
    for number in range(-_WARM_UP, rounds):
        if number >= _WARM_UP and time.perf_counter() > end:
            break
        shift = number % len(calls)
        for at in [*range(shift, len(calls)), *range(shift)]:
            begin = time.perf_counter()
            calls[at]()
            elapsed = time.perf_counter() - begin
            if number >= 0:
                found[at].append(1e6 * elapsed)
    return found


def measure_speed(artifact: Artifact, in_float: Artifact, leaves: Sequence[Any]) -> None:
    """Time an artifact and its float program on a call, and tell the report.

    Args:
        artifact: what was lowered; it is reset afterwards.
        in_float: the float program, lowered by the same backend.
        leaves: of the call.

    Warns:
        Pt2eQuantWarning: the artifact is slower; names the operators that cost most time.
    """
    both = (artifact, in_float)
    own = [copied_leaves(leaves) for _ in both]
    calls = [lambda a=a, x=x: a.run_leaves(x) for a, x in zip(both, own, strict=True)]
    # The least: what else the machine does only makes calls longer.
    call_us, float_us = map(min, times_in_turn(calls, rounds=_ROUNDS, seconds=_SECONDS))
    report = artifact.report
    report.call_us, report.float_call_us = call_us, float_us
    ratio = float_us / call_us
    if ratio < 1 - TIE:
        warnings.warn(
            f"on this machine {report.backend} runs the artifact at {ratio:.2f}x the speed of the "
            f"float program ({call_us:,.0f} us a call, {float_us:,.0f} us in float)"
            f"{_named_costs(artifact, in_float, leaves)}. {_way_out(artifact)}",
            Pt2eQuantWarning,
            stacklevel=2,
        )
    artifact.reset()


def _named_costs(artifact: Artifact, in_float: Artifact, leaves: Sequence[Any]) -> str:
    """The operators that take more time than in float, in words."""
    try:
        taken, before = (a.time_operators(copied_leaves(leaves)) for a in (artifact, in_float))
    except UnsupportedError:
        return "; the runtime does not tell which operators cost"
    known = {node.node: node.time_us for node in before.nodes}
    costs = {node: node.time_us - known.get(node.node, 0.0) for node in taken.nodes}
    most = sorted((n for n in costs if costs[n] > 0), key=lambda node: -costs[node])[:_NAMED]
    moved = sum(n.time_us for n in taken.nodes if n.kind in (WorkKind.CONVERT, WorkKind.MOVE))
    share = moved / taken.time_us if taken.time_us else 0.0
    listed = ", ".join(f"{_shown(node)} +{costs[node]:,.0f} us" for node in most)
    return f"; {share:.0%} of its time goes into conversion and movement; most cost {listed}"


def _shown(node: NodeTime) -> str:
    return f"{node.node} ({node.kernel}{f' in {node.module}' if node.module else ''})"


def _way_out(artifact: Artifact) -> str:
    roles = {record.role for record in artifact.report.provenance.tensors}
    if roles and not roles & {Role.INPUT, Role.OUTPUT}:
        return (
            "Its weights alone are quantized, and decoded in calls; a recipe that quantizes "
            "activations too (a8w4_g32 for w4_g32, int8_dynamic for w8) multiplies integers"
        )
    return (
        'Leave the modules of these operators float (quantizer.set_module_name("…", None), '
        "--keep-float), or use the float program"
    )


def leave_in_float(
    gm: GraphModule, lower: Callable[[GraphModule], Artifact], leaves: Sequence[Any]
) -> GraphModule:
    """The graph with each part in float that makes its calls faster on this machine.

    First all operators of one class of sizes are tried in float, each between its q/dq. Then whole
    integer regions are, without the q/dq inside. A part that is faster in float stays so while the
    next one is tried.

    Args:
        gm: the canonical graph, which is not changed.
        lower: makes an artifact, unchecked.
        leaves: of the call that is timed.
    """
    best = lower(gm)
    for find in (_classes, _regions):
        for name, part in list(find(gm))[:_MOST]:
            members = {node.name for node in part}
            trial = in_float(gm, dict.fromkeys(members, "tried"))
            artifact = lower(trial)
            call_us, trial_us = _least_us((best, artifact), leaves)
            if trial_us < (1 - _WIN) * call_us:
                text = (
                    f"a call took {call_us:,.0f} us on this machine, {trial_us:,.0f} us with "
                    f"{name} in float"
                )
                gm, best = in_float(gm, dict.fromkeys(members, text)), artifact
    return gm


def _least_us(artifacts: Sequence[Artifact], leaves: Sequence[Any]) -> list[float]:
    own = [copied_leaves(leaves) for _ in artifacts]
    calls = [lambda a=a, x=x: a.run_leaves(x) for a, x in zip(artifacts, own, strict=True)]
    found = [min(us) for us in times_in_turn(calls, rounds=_TRIAL_ROUNDS, seconds=_TRIAL_SECONDS)]
    for artifact in artifacts:
        artifact.reset()
    return found


def _classes(gm: GraphModule) -> Iterator[tuple[str, list[Node]]]:
    """The integer operators, without views, by class of sizes; the largest results first."""
    found: dict[str, list[Node]] = {}
    for node in gm.graph.nodes:
        if computed_reads(gm, node) and not is_call(node, VIEWS) and elements_of(node):
            found.setdefault(shape_class(node) or str(node.target), []).append(node)
    return iter(sorted(found.items(), key=lambda item: -sum(map(elements_of, item[1]))))


def _regions(gm: GraphModule) -> Iterator[tuple[str, list[Node]]]:
    """Connected regions of integer operators, smallest first."""
    region_of: dict[Node, list[Node]] = {}
    for node in gm.graph.nodes:
        reads = computed_reads(gm, node)
        sources = [real_of(read) for read in reads]
        is_behind = not reads and any(n in region_of and len(n.users) == 1 for n in _floats(node))
        sources += _floats(node) if is_behind else []
        if not reads and not is_behind:
            continue
        joined = [node]
        for source in dict.fromkeys(sources):
            if source in region_of and region_of[source] is not joined:
                joined += region_of[source]
                region_of |= dict.fromkeys(region_of[source], joined)
        region_of |= dict.fromkeys(joined, joined)
    parts = {id(part): part for part in region_of.values()}.values()
    found = sorted(parts, key=len)
    return (
        (f"the {len(part)} operators from {part[0].name} to {part[-1].name}", part)
        for part in found
    )


def _floats(node: Node) -> list[Node]:
    """The inputs of an operator that no dequantize makes."""
    if node.op != "call_function" or is_qdq(node):
        return []
    return [n for n in node.all_input_nodes if n.op == "call_function" and not is_dequantize(n)]
