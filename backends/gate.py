"""The check every artifact passes before it is handed out."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from pt2e_quant.backends.artifact import Artifact
from pt2e_quant.backends.one_thread import one_thread
from pt2e_quant.backends.rounding_noise import run_with_rounding_noise
from pt2e_quant.core.errors import ArtifactError
from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.flow.calibrate import preserve_buffers
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


def check_artifact(artifact: Artifact, gm: GraphModule, sample: Sample, margin_db: float) -> None:
    """Run the artifact and the canonical graph on one sample; results go to the report.

    The graph runs on one thread, so that what is asked for does not depend on their number; the
    artifact runs as it will.

    Raises:
        ArtifactError: the artifact is further from the canonical graph than
            SQNR(canonical, float) + margin_db (at most CEILING_DB), or than FLOOR_DB if the
            float result is unknown; and DRAW_MARGIN_DB further than each of DRAWS runs of the
            graph with rounding noise.
    """
    capture = capture_of(gm)
    expected = _run(gm, sample, lambda *leaves: gm(*capture.positional(leaves)))
    found = list(artifact.run_leaves(sample.leaves))
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
        raise ArtifactError(
            f"the artifact differs from the canonical graph: SQNR {ratio:.1f} dB, "
            f"expected at least {bound:.1f} dB{reason}",
            fix="lower(..., margin_db=…) to accept it, verify=False to look at it",
        )


def _run(gm: GraphModule, sample: Sample, call: Callable[..., Any]) -> list[Any]:
    """The flat result of a call on the sample's leaves, on one thread; buffers are as before."""
    with torch.no_grad(), one_thread(), preserve_buffers(gm, capture_of(gm)):
        # Copies: a graph may write into its inputs.
        leaves = [v.clone() if isinstance(v, Tensor) else v for v in sample.leaves]
        found: list[Any] = pytree.tree_leaves(call(*leaves))
    return found


def _own_noise_db(
    gm: GraphModule, sample: Sample, expected: Sequence[Any], enough_db: float
) -> float:
    """The least SQNR of the graph with rounding noise; no more draws once it is `enough_db`."""
    least = math.inf
    for draw in range(DRAWS):
        noisy = _run(gm, sample, partial(run_with_rounding_noise, gm, draw=draw))
        least = min(least, sqnr_db(expected, noisy))
        if least <= enough_db:
            break
    return least
