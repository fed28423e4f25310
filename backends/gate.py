"""The check every artifact passes before it is handed out."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch.fx import GraphModule

from pt2e_quant.backends.artifact import Artifact
from pt2e_quant.backends.first_apart import FirstApart, LowerPart, find_first_apart
from pt2e_quant.backends.rounding_noise import run_with_rounding_noise
from pt2e_quant.backends.sample_run import copied_leaves, run_graph, run_on_sample
from pt2e_quant.core.errors import ArtifactError
from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.flow.sample import Sample, sample_of, sqnr_db

__all__ = ["CEILING_DB", "DRAWS", "DRAW_MARGIN_DB", "FLOOR_DB", "check_artifact", "choose_sample"]

FLOOR_DB = 20.0
"""The bound where the float result on the sample is not known."""

CEILING_DB = 35.0
"""No more is asked: 8-bit outputs that are all off by one step are 36 dB apart, and runtimes may
round ties their own way."""

DRAWS = 16
"""Runs with rounding noise. An artifact that differs from the graph by rounding alone is one more
draw of their distribution: it is further away than all of them once in 17 times at most."""

DRAW_MARGIN_DB = 1.0
"""How much further than the furthest draw is accepted: a quarter more noise energy. Where rounding
is amplified to the full, draws lie within fractions of a dB, and so does an artifact."""


def choose_sample(gm: GraphModule, example_inputs: Sequence[Any] | None) -> Sample:
    """The user's example inputs, else the sample kept from calibration."""
    if example_inputs is None:
        return sample_of(gm)
    leaves = capture_of(gm).bind(example_inputs)
    return Sample(leaves=tuple(leaves), float_outputs=None)


def check_artifact(
    artifact: Artifact,
    gm: GraphModule,
    sample: Sample,
    margin_db: float,
    *,
    lower_part: LowerPart | None = None,
) -> None:
    """Run the artifact and the canonical graph on one sample; results go to the report.

    The graph runs on one thread, so that what is asked for does not depend on their number; the
    artifact runs as it will.

    Args:
        artifact: what was lowered, before its first call.
        gm: the canonical graph that it was lowered from.
        sample: the call to run.
        margin_db: as `Backend.lower` has it.
        lower_part: lowers a part of the graph likewise, without a check; called a few times where
            the check fails, to name the operator at fault. Without it the error names none.

    Raises:
        ArtifactError: the artifact is further from the canonical graph than
            SQNR(canonical, float) + margin_db (at most CEILING_DB), or than FLOOR_DB if the
            float result is unknown; and DRAW_MARGIN_DB further than each of DRAWS runs of the
            graph with rounding noise.
    """
    expected = run_graph(gm, sample)
    found = list(artifact.run_leaves(copied_leaves(sample)))
    ratio = sqnr_db(expected, found)
    bound = FLOOR_DB
    if sample.float_outputs is not None:
        to_float = sqnr_db(sample.float_outputs, expected)
        artifact.report.sqnr_float_db = to_float
        bound = min(to_float + margin_db, CEILING_DB)
    artifact.report.sqnr_canonical_db = ratio
    reason = ""
    if ratio < bound:
        own = _own_noise_db(gm, sample, expected, ratio + DRAW_MARGIN_DB)
        if own - DRAW_MARGIN_DB < bound:
            bound = own - DRAW_MARGIN_DB
            reason = ", as far as float rounding alone moves this graph"
            artifact.report.notes.append(
                "this graph amplifies float rounding: computed with noise of the size of rounding "
                f"it differs from itself by {own:.1f} dB"
            )
    if math.isnan(ratio) or ratio < bound:
        apart = None
        if lower_part is not None:
            apart = _first_apart(gm, sample, (expected, found), lower_part, bound)
        raise ArtifactError(
            f"the artifact differs from the canonical graph: SQNR {ratio:.1f} dB, "
            f"expected at least {bound:.1f} dB{reason}{'; ' + apart.text if apart else ''}",
            node=apart.node if apart else None,
            fix="lower(..., margin_db=…) to accept it, verify=False to look at it",
        )


def _own_noise_db(
    gm: GraphModule, sample: Sample, expected: Sequence[Any], enough_db: float
) -> float:
    """The least SQNR of the graph with rounding noise; no more draws once it is `enough_db`."""
    least = math.inf
    for draw in range(DRAWS):
        noisy = run_on_sample(gm, sample, partial(run_with_rounding_noise, gm, draw=draw))
        least = min(least, sqnr_db(expected, noisy))
        if least <= enough_db:
            break
    return least


def _first_apart(
    gm: GraphModule,
    sample: Sample,
    results: tuple[Sequence[Any], Sequence[Any]],
    lower_part: LowerPart,
    bound_db: float,
) -> FirstApart | None:
    try:
        return find_first_apart(gm, sample, results, lower_part, bound_db)
    except Exception:  # Whatever stops the search: the check failed, and that is the error.
        return None
