"""Which tiles are fastest on a device: sweep, check, decide, write the table."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu_check import difference
from benchmarks.gpu_kernels import Gpu, rotated
from benchmarks.gpu_timer import Program
from benchmarks.kernels.bench_case import Bench
from pt2e_quant.kernels import __file__ as kernels_file
from pt2e_quant.kernels.tiles import TileConfig, read_tiles

__all__ = ["Sweep", "sweep_kernel", "write_measured", "write_tiles"]

KERNELS = Path(kernels_file).parent
FINALISTS = 5
GAIN = 1.02
"""A row replaces the default's only where it is this much faster: less is noise."""


@dataclass(slots=True, kw_only=True)
class Sweep:
    """What the tuning of one shape class found.

    Args:
        op: the unit.
        shape_class: the row.
        best: the row's new configuration.
        speed_up: its speed over the default's, the geometric mean over the class's cases.
        tried: configurations that ran.
        refused: those that the compiler or the device refused, by reason.
        wrong: those whose results were not the default's.
    """

    op: str
    shape_class: str
    best: TileConfig
    speed_up: float
    tried: int
    refused: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, object]:
        """As a row of the results."""
        return {
            "op": self.op,
            "shape_class": self.shape_class,
            "best": self.best.options(),
            "speed_up": round(self.speed_up, 3),
            "tried": self.tried,
            "refused": self.refused,
            "wrong": self.wrong,
        }


def sweep_kernel(gpu: Gpu, bench: Bench[Any], shape_class: str) -> Sweep:
    """Time every configuration roughly, the best few beside the default again, and choose.

    A configuration counts only if its results are the default's within the kernel's bound.
    """
    default = read_tiles(bench.op)[shape_class]
    earlier = read_tiles(bench.op, gpu.slug).get(shape_class, default)
    cases = [case for case in bench.cases if case.shape_class == shape_class]
    found = Sweep(op=bench.op, shape_class=shape_class, best=default, speed_up=1.0, tried=0)
    operands = [rotated(gpu, case) for case in cases]
    if not cases:
        return found
    rough: dict[TileConfig, float] = {}
    for tiles in bench.sweep.get(shape_class, ()):
        if tiles != default and _is_right(bench, operands, tiles, found):
            rough[tiles] = _mean_seconds(gpu, bench, operands, [tiles], rounds=5)[tiles]
    found.tried = len(rough)
    best = sorted(rough, key=lambda t: rough[t])[:FINALISTS]
    finalists = list(dict.fromkeys([default, earlier, *best]))
    times = _mean_seconds(gpu, bench, operands, finalists, rounds=gpu.rounds)
    fastest = min(finalists, key=lambda t: times[t])
    if times[default] >= GAIN * times[fastest]:
        found.best, found.speed_up = fastest, times[default] / times[fastest]
    return found


def _is_right(
    bench: Bench[Any], operands: Sequence[Sequence[Any]], tiles: TileConfig, found: Sweep
) -> bool:
    for copies in operands:
        try:
            made = bench.call(copies[0], tiles)
        except Exception as error:  # what a device refuses is counted
            kind = type(error).__name__
            found.refused[kind] = found.refused.get(kind, 0) + 1
            return False
        if difference(made, bench.call(copies[0], None), bench.bound(copies[0])) is not None:
            found.wrong.append(str(tiles.options()))
            return False
    return True


def _mean_seconds(
    gpu: Gpu,
    bench: Bench[Any],
    operands: Sequence[Sequence[Any]],
    configurations: Sequence[TileConfig],
    *,
    rounds: int,
) -> dict[TileConfig, float]:
    """The geometric mean over the cases, of programs that are timed in turn."""
    logs = dict.fromkeys(configurations, 0.0)
    for copies in operands:
        programs: dict[str, Program] = {}
        for number, tiles in enumerate(configurations):
            calls = [lambda one=one, tiles=tiles: bench.call(one, tiles) for one in copies]
            programs[str(number)] = gpu.timer.capture(calls)
        times = gpu.timer.time(programs, rounds=rounds)
        for number, tiles in enumerate(configurations):
            logs[tiles] += math.log(times[str(number)].median_s) / len(operands)
    return {tiles: math.exp(value) for tiles, value in logs.items()}


def write_tiles(
    op: str, slug: str, rows: Mapping[str, TileConfig], *, folder: Path = KERNELS
) -> Path:
    """`kernels/<op>/tiles/<slug>.json`: the rows given, and those that an earlier run measured."""
    kept = {name: row.options() for name, row in read_tiles(op, slug).items()}
    rows_now = {**kept, **{name: row.options() for name, row in rows.items()}}
    return _write_rows(folder / op / "tiles" / f"{slug}.json", rows_now)


def write_measured(
    op: str, slug: str, ratios: Mapping[str, float], *, folder: Path = KERNELS
) -> Path:
    """`kernels/<op>/measured/<slug>.json`: what lowering decides by."""
    file = folder / op / "measured" / f"{slug}.json"
    kept = json.loads(file.read_text()) if file.exists() else {}
    return _write_rows(file, {**kept, **{name: round(r, 3) for name, r in ratios.items()}})


def _write_rows(file: Path, rows: Mapping[str, object]) -> Path:
    """One row a line, so that a rerun shows as the rows that changed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = (f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return file
