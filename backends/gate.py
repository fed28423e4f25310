"""The check every artifact passes before it is handed out."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from pt2e_quant.backends.artifact import Artifact
from pt2e_quant.backends.rounding_noise import run_with_rounding_noise
from pt2e_quant.core.errors import ArtifactError
from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.flow.calibrate import preserve_buffers
from pt2e_quant.flow.sample import Sample, sample_of, sqnr_db

__all__ = ["CEILING_DB", "FLOOR_DB", "NOISE_MARGIN_DB", "check_artifact", "choose_sample"]

FLOOR_DB = 20.0
"""The bound where the float result on the sample is not known."""

CEILING_DB = 35.0
"""No more is asked: 8-bit outputs that are all off by one step are 36 dB apart, and runtimes may
round ties their own way."""

NOISE_MARGIN_DB = 3.0
"""Two computations that share nothing but the exact result are so much further apart."""


def choose_sample(gm: GraphModule, example_inputs: Sequence[Any] | None) -> Sample:
    """The user's example inputs, else the sample kept from calibration."""
    if example_inputs is None:
        return sample_of(gm)
    leaves = capture_of(gm).bind(example_inputs)
    return Sample(leaves=tuple(leaves), float_outputs=None)


def check_artifact(artifact: Artifact, gm: GraphModule, sample: Sample, margin_db: float) -> None:
    """Run the artifact and the canonical graph on one sample; results go to the report.

    Raises:
        ArtifactError: the artifact is further from the canonical graph than
            SQNR(canonical, float) + margin_db (at most CEILING_DB), or than FLOOR_DB if the
            float result is unknown; and further than float rounding alone would explain.
    """
    capture = capture_of(gm)
    with torch.no_grad(), preserve_buffers(gm, capture):
        # Copies: a graph may write into its inputs.
        leaves = [v.clone() if isinstance(v, Tensor) else v for v in sample.leaves]
        expected = pytree.tree_leaves(gm(*capture.positional(leaves)))
    found = list(artifact.run_leaves(sample.leaves))
    ratio = sqnr_db(expected, found)
    bound = FLOOR_DB
    if sample.float_outputs is not None:
        to_float = sqnr_db(sample.float_outputs, expected)
        artifact.report.sqnr_float_db = to_float
        bound = min(to_float + margin_db, CEILING_DB)
    artifact.report.sqnr_canonical_db = ratio
    if ratio < bound:
        bound = _reachable(artifact, gm, sample, expected, bound)
    if math.isnan(ratio) or ratio < bound:
        raise ArtifactError(
            f"the artifact differs from the canonical graph: SQNR {ratio:.1f} dB, "
            f"expected at least {bound:.1f} dB",
            fix="lower(..., margin_db=…) to accept it, verify=False to look at it",
        )


def _reachable(
    artifact: Artifact, gm: GraphModule, sample: Sample, expected: Sequence[Any], bound: float
) -> float:
    """The bound, or what is left of it where the graph amplifies float rounding."""
    capture = capture_of(gm)
    with torch.no_grad(), preserve_buffers(gm, capture):
        leaves = [v.clone() if isinstance(v, Tensor) else v for v in sample.leaves]
        noisy = pytree.tree_leaves(run_with_rounding_noise(gm, *leaves))
    own = sqnr_db(expected, noisy)
    if own - NOISE_MARGIN_DB >= bound:
        return bound
    artifact.report.notes.append(
        f"this graph amplifies float rounding: computed with noise of one unit in the last place "
        f"it differs from itself by {own:.1f} dB"
    )
    return own - NOISE_MARGIN_DB
