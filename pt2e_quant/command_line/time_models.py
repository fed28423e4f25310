"""Times models in turn, so that all of them see the same machine."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pt2e_quant.backends.measure_speed import times_in_turn
from pt2e_quant.command_line.open_model import RunLeaves
from pt2e_quant.core.capture import Capture
from pt2e_quant.core.input_info import InputKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The time of one call of one model."""

    median_us: float
    min_us: float
    size_bytes: int


def time_in_turn(
    runs: Mapping[str, RunLeaves],
    leaves: Sequence[Any],
    *,
    rounds: int,
    sizes: Mapping[str, int],
) -> dict[str, Timing]:
    """Call every model once a round; the order turns round by round.

    Args:
        runs: label to the function that runs the model.
        leaves: of the call.
        rounds: calls of each model that are timed.
        sizes: label to the bytes of its file.
    """
    samples = times_in_turn([partial(run, leaves) for run in runs.values()], rounds=rounds)
    return {
        label: Timing(
            median_us=statistics.median(times), min_us=min(times), size_bytes=sizes[label]
        )
        for label, times in zip(runs, samples, strict=True)
    }


def noise_leaves(capture: Capture) -> list[Any]:
    """Seeded inputs of the captured sizes: normal noise for floats, ones for integers."""
    generator = torch.Generator().manual_seed(0)
    args, kwargs = capture.example_inputs()
    leaves = []
    for info, leaf in zip(capture.inputs, capture.bind(args, kwargs), strict=True):
        if info.kind is InputKind.TENSOR and isinstance(leaf, Tensor):
            if leaf.is_floating_point():
                leaf = torch.randn(leaf.shape, generator=generator).to(leaf.dtype)
            else:
                leaf = torch.ones_like(leaf)
        leaves.append(leaf)
    return leaves
