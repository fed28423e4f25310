"""CPU times of calls in turn, ratios by class of sizes, and the files that they are kept in."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import geometric_mean

from torch import Tensor

import pt2e_quant.kernels
from benchmarks.measure import interleave
from pt2e_quant.kernels.onednn.speed import cpu_slug

__all__ = ["Call", "means", "times_of", "with_any_rows", "write_ratios"]

Call = Callable[[], Tensor]
_CALLS = 5
"""Calls in one sample: a single one is too short for the clock."""


def times_of(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """The least CPU time of each call, in milliseconds for `_CALLS` of them."""
    repeated = {name: _repeat(call) for name, call in calls.items()}
    found = interleave(repeated, rounds=rounds, clock=time.process_time)
    return {name: latency.min_ms for name, latency in found.items()}


def _repeat(call: Call) -> Callable[[], None]:
    def run() -> None:
        for _ in range(_CALLS):
            call()

    return run


def means(found: dict[str, list[float]]) -> dict[str, float]:
    """The geometric mean of each class's ratios."""
    return {name: round(geometric_mean(ratios), 2) for name, ratios in sorted(found.items())}


def with_any_rows(
    class_of: Callable[[int | None, int], str], found: dict[tuple[int, int], list[float]]
) -> dict[str, float]:
    """The ratio of each class; where rows are known at run time only, that of the worst number.

    Args:
        class_of: names the class of so many rows (None: any) by a weight of so many elements.
        found: ratios by rows and weight.
    """
    ratios: dict[str, list[float]] = {}
    by_weight: dict[str, set[str]] = {}
    for (rows, weight), measured in found.items():
        name = class_of(rows, weight)
        ratios.setdefault(name, []).extend(measured)
        by_weight.setdefault(class_of(None, weight), set()).add(name)
    made = means(ratios)
    return made | {name: min(made[one] for one in ones) for name, ones in by_weight.items()}


def write_ratios(results: dict[str, dict[str, float]], *, is_written: bool) -> None:
    """Print each unit's ratios, and write them to its file for CPUs like this one."""
    for op, ratios in results.items():
        text = json.dumps(ratios, indent=2) + "\n"
        print(op, cpu_slug(), text)
        if is_written:
            file = Path(pt2e_quant.kernels.__path__[0], op, "measured", f"{cpu_slug()}.json")
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
