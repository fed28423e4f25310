"""Measured times of a runtime's operators and conversions, read by the nearest sizes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from statistics import median

from pt2e_quant.backends.target.speed_classes import Work
from pt2e_quant.kernels.measured import read_rows
from pt2e_quant.kernels.onednn.speed import measured_cpu


@dataclass(frozen=True, slots=True)
class Timed:
    """One measurement.

    Args:
        work: what was timed.
        us: microseconds by form: "integer" and "float" of operators; "quantize", "dequantize",
            "reorder" and "transpose" of the conversions around them.
    """

    work: Work
    us: Mapping[str, float]


Times = Mapping[str, Sequence[Timed]]
"""Measurements by kind."""


def times_here(backend: str) -> Times:
    """The measurements on the CPU most like this one (`measured_cpu`); empty if there are none.

    Args:
        backend: the name of its folder, whose `measured/<cpu>_times.json` a benchmark wrote.
    """
    found: dict[str, list[Timed]] = {}
    package, path = f"pt2e_quant.backends.{backend}", "measured/{cpu}_times.json"
    for row in read_rows(package, path.format(cpu=measured_cpu(package, path))):
        us = {name: us for name, us in row.items() if isinstance(us, float)}
        work = Work(row["kind"], tuple(row["sizes"]), row["amount"])
        found.setdefault(work.kind, []).append(Timed(work, us))
    return found


def predict(times: Times, work: Work, *, among: int = 1) -> dict[str, float]:
    """Nanoseconds by form, for as much work, after measurements of its kind; empty without any.

    Args:
        times: all measurements.
        work: what is asked for.
        among: the median of so many of the nearest sizes is taken.
    """
    nearest = nsmallest(among, times.get(work.kind, ()), key=lambda one: _distance(one.work, work))
    units: dict[str, list[float]] = {}
    for one in nearest:
        for form, us in one.us.items():
            units.setdefault(form, []).append(1e3 * us / one.work.amount)
    return {form: median(ns) * work.amount for form, ns in units.items()}


def _distance(one: Work, other: Work) -> float:
    """How many doublings are between two sizes, all together."""
    return sum(abs(math.log2(a / b)) for a, b in zip(one.sizes, other.sizes, strict=True))
