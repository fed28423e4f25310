"""The gate: every artifact is checked against its graph before a user gets it."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from pt2e_quant.backends.artifact import Artifact, Verify
from pt2e_quant.backends.compare_results import Results, compare
from pt2e_quant.backends.first_apart import LowerPart, lowered_once
from pt2e_quant.backends.judge_results import (
    CEILING_DB,
    DRAW_MARGIN_DB,
    FLOAT_CEILING_DB,
    FLOOR_DB,
    Judge,
)
from pt2e_quant.backends.name_refused import first_refused
from pt2e_quant.backends.new_process import run_in_new_process
from pt2e_quant.backends.registry import names
from pt2e_quant.backends.run_calls import run_artifact
from pt2e_quant.backends.trials import Trial, Trials
from pt2e_quant.core.errors import ArtifactError, ConfigError, Pt2eQuantError, near
from pt2e_quant.core.inexact import is_inexact
from pt2e_quant.core.qdq import is_qdq
from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.flow.calibrate.sample import Sample, sample_of, sqnr_db
from pt2e_quant.graph.alias import nested_graphs, subgraph_of, writes
from pt2e_quant.graph.random_draws import draws, reached

__all__ = [
    "CEILING_DB",
    "DRAW_MARGIN_DB",
    "FLOAT_CEILING_DB",
    "FLOOR_DB",
    "check_artifact",
    "choose_sample",
    "drawn_results",
    "loader_of",
    "rounded_results",
]

_AGAIN = "the sample again, behind other calls and a reset"


def choose_sample(gm: GraphModule, example_inputs: Sequence[Any] | None) -> Sample:
    """The user's example inputs, else the sample kept from calibration."""
    if example_inputs is None:
        return sample_of(gm)
    leaves = capture_of(gm).bind(example_inputs)
    return Sample(leaves=tuple(leaves), float_outputs=None)


def loader_of(verify: Verify, backend: str) -> str | None:
    """The name of the backend that a new process is to load the artifact with, None for no process.

    Raises:
        ConfigError: `verify` is none of its values, or a new process does not know the backend.
    """
    if isinstance(verify, bool):
        return None
    if verify != "process":
        raise ConfigError(
            f'verify is True, False or "process", found {verify!r}',
            fix="verify=True checks the artifact in this process alone",
        )
    if backend not in names():
        raise ConfigError(
            f'a new process does not know the backend "{backend}": {near(backend, names())}',
            fix='give it an entry point of the group "pt2e_quant.backends", or verify=True',
        )
    return backend


def check_artifact(
    artifact: Artifact,
    gm: GraphModule,
    sample: Sample,
    margin_db: float,
    *,
    lower_part: LowerPart | None = None,
    loader: str | None = None,
) -> None:
    """Run an artifact and its canonical graph on a sample and on other calls, and compare.

    Each result is judged by itself, and so is each written buffer that the artifact shows. The
    sample is followed by calls of other sizes with fresh data, each size twice, and after a reset
    by the sample again. Calls that the graph itself refuses are left out, with a note. Of results
    that depend on random numbers only dtype and number of dimensions are compared, with a note.

    The graph runs on one thread, so that the expected results do not depend on the number of
    threads; the artifact runs with as many as it is set to.

    Args:
        artifact: what was lowered, before its first call; it is reset afterwards. Its report is
            told how far it is from the graph.
        gm: the canonical graph that it was lowered from.
        sample: the first call to run.
        margin_db: as `Backend.lower` has it.
        lower_part: lowers a part of the graph likewise, without a check; called a few times where
            the check fails, to name the operator at fault. Without it the error names none.
        loader: the name of a backend: the artifact is saved first, and a new process loads it and
            runs the same calls, so that a crash ends that process and not this one.

    Raises:
        ArtifactError: the artifact stops at a call; or a float result is further from the canonical
            graph's than SQNR(canonical, float) + margin_db (at most CEILING_DB, or FLOAT_CEILING_DB
            where quantization does not reach the result; both plus a negative margin_db), or than
            FLOOR_DB if the float result is unknown, and DRAW_MARGIN_DB further than each of DRAWS
            runs of the graph with rounding noise, and than its steps explain; or more elements of
            another result differ than in any of FLIP_DRAWS runs whose steps flip as other runtimes'
            may.
    """
    trials = Trials(gm, sample, artifact.capture)
    report, first = artifact.report, trials.trials[0]
    drawn = _drawn(gm, first)
    to_float = _to_float_db(first, sample, drawn)
    if to_float:
        ratios = [sqnr_db(*pair) if math.isnan(db) else db for db, *pair in to_float.values()]
        report.sqnr_float_db = math.nan if any(map(math.isnan, ratios)) else min(ratios)
    ceilings = _ceilings(gm, first)
    bounds = {
        name: min(db + margin_db, ceilings.get(name, CEILING_DB) + min(margin_db, 0.0))
        for name, (db, *_) in to_float.items()
        if not math.isnan(db)
    }
    lower_part = None if lower_part is None else lowered_once(lower_part)
    told: dict[str, Any] = {"drawn": drawn, "notes": report.notes, "lower_part": lower_part}
    judge = Judge(trials=trials, bounds=bounds, **told)
    calls = [(f" in call {at}, with {t.label}", t) for at, t in enumerate(trials.trials, start=1)]
    calls[0] = ("", first)
    if loader is not None:
        _check_in_new_process(artifact, loader, replace(judge, lower_part=None), calls)
    for at, (where, trial) in enumerate(calls):
        found = _run(artifact, trial, where, gm, lower_part)
        if not at:
            report.sqnr_canonical_db = _least_db(first.results, found, drawn)
        judge.judge(at, found, where)
    artifact.reset()
    again = f" in {_AGAIN}"
    judge.judge(0, _run(artifact, first, again, gm, lower_part), again)
    artifact.reset()
    report.notes += [f"the call with {text}" for text in trials.skipped]


def _check_in_new_process(
    artifact: Artifact, loader: str, judge: Judge, calls: Sequence[tuple[str, Trial]]
) -> None:
    asked = [(where or " in call 1, with the sample", trial) for where, trial in calls]
    asked.append((f" in {_AGAIN}", calls[0][1]))
    results = run_in_new_process(
        artifact,
        loader,
        [(where.removeprefix(" "), trial.leaves) for where, trial in asked],
        reset_before=len(calls),
        graph_s=judge.trials.seconds,
    )
    for at, ((where, _), found) in enumerate(zip(asked, results, strict=True)):
        judge.judge(at % len(calls), found, f" in a new process,{where}")


def _drawn(gm: GraphModule, first: Trial) -> frozenset[str]:
    """The results that depend on random numbers, and the written buffers with them if all do."""
    drawn = drawn_results(gm)
    if drawn and all(drawn):
        return frozenset(first.results)
    return frozenset(name for name, is_drawn in zip(first.results, drawn, strict=False) if is_drawn)


def _to_float_db(
    first: Trial, sample: Sample, drawn: Collection[str]
) -> dict[str, tuple[float, Any, Any]]:
    """The SQNR of each float result from the float graph's, that one, and the canonical graph's.

    It is NaN where NaN or infinity are in other places. Of results that are drawn it is not known.
    """
    pairs = zip(first.results.items(), sample.float_outputs or (), strict=False)
    return {
        name: (compare(wanted, found).ratio_db, wanted, found)
        for (name, found), wanted in pairs
        if is_inexact(found) and name not in drawn
    }


def _ceilings(gm: GraphModule, first: Trial) -> dict[str, float]:
    """The most that is asked of each result; buffers, which come behind the results, have none."""
    rounded = rounded_results(gm)
    return {
        name: CEILING_DB if is_rounded else FLOAT_CEILING_DB
        for name, is_rounded in zip(first.results, rounded, strict=False)
    }


def _least_db(expected: Results, found: Results, drawn: Collection[str]) -> float | None:
    """The least SQNR of the results; NaN if one cannot be compared, None if all are drawn."""
    compared = expected.keys() - drawn
    ratios = [compare(expected[name], found.get(name)).ratio_db for name in compared]
    return math.nan if any(map(math.isnan, ratios)) else min(ratios, default=None)


def _run(
    artifact: Artifact, trial: Trial, where: str, gm: GraphModule, lower_part: LowerPart | None
) -> Results:
    try:
        return run_artifact(artifact, trial.leaves)
    except Exception as error:  # Whatever a runtime raises.
        what, fix, node = f"{type(error).__name__}: {error}", None, None
        if isinstance(error, Pt2eQuantError):
            what, fix = error.what, error.fix
        if lower_part is not None:
            lower = lower_part
            node = first_refused(gm, lambda part: run_artifact(lower(part), trial.leaves))
        if trial.label and fix is None:
            fix = "declare sizes without this one: torch.export.Dim(name, min=…, max=…)"
        raise ArtifactError(
            f"the artifact stops{where}: {what}", node=node, fix=fix or "verify=False to look at it"
        ) from error


def rounded_results(gm: GraphModule) -> tuple[bool, ...]:
    """Return True for each result that quantization reaches; the others are float32 throughout.

    Values of 16 bits count as rounded too, because runtimes compute them in float32. Values that
    are written in place are not followed: if one of them may be rounded, every result may be.
    Operators from elsewhere than ATen (kernels, foreign quantize operators) may round.
    """
    return _reached(gm, _rounds)


def drawn_results(gm: GraphModule) -> tuple[bool, ...]:
    """Return True for each result that depends on random numbers, which each run draws anew."""
    return _reached(gm, draws)


def _reached(gm: GraphModule, starts: Callable[[Node], bool]) -> tuple[bool, ...]:
    """True for each result that comes behind a start; all of them if a value is written there."""
    found = reached(gm.graph, starts)
    leaves = pytree.tree_leaves(gm.graph.output_node().args[0])
    if any(written for node in found for written in writes(node)):
        return (True,) * len(leaves)
    return tuple(isinstance(leaf, Node) and leaf in found for leaf in leaves)


def _rounds(node: Node) -> bool:
    value = node.meta.get("val")
    if isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize < 4:
        return True
    if node.op == "get_attr":
        body = subgraph_of(node)
        return body is not None and any(
            _rounds(inner) for graph in nested_graphs(body) for inner in graph.graph.nodes
        )
    if node.op != "call_function":
        return False
    namespace = getattr(node.target, "namespace", "aten")
    return is_qdq(node) or namespace not in ("aten", "higher_order", "prim", "prims")
