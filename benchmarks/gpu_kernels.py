"""One shape of one kernel beside its peers: times, ratios, share of the roofline."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from benchmarks.gpu_timer import Program, Timer, Timing, copies_for
from benchmarks.kernels.bench_case import Bench, BenchCase
from benchmarks.kernels.device_limits import DeviceLimits
from pt2e_quant.kernels.tiles import TileConfig

__all__ = ["Gpu", "float_ratios", "measure_case", "rotated"]

Row = dict[str, object]
OURS = "pt2e_quant"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """The device that is measured.

    Args:
        device: of torch.
        slug: its name as `tiles.device_slug` writes it.
        l2_bytes: of its second cache.
        memory_bytes: of its memory.
        limits: of its data sheet; None if none are kept.
        timer: what measures.
        rounds: replays of each program.
    """

    device: torch.device
    slug: str
    l2_bytes: int
    memory_bytes: int
    limits: DeviceLimits | None
    timer: Timer
    rounds: int = 50


def rotated(gpu: Gpu, case: BenchCase[Any]) -> list[Any]:
    """Operands of a case, so many that a call finds none of its own in L2."""
    first = case.make(gpu.device, 0)
    size = sum(
        t.numel() * t.element_size() for t in pytree.tree_leaves(first) if isinstance(t, Tensor)
    )
    # A tenth: peers hold bf16 copies, and all are in memory at once.
    count = copies_for(size, l2_bytes=gpu.l2_bytes, memory_bytes=gpu.memory_bytes // 10)
    return [first, *(case.make(gpu.device, seed) for seed in range(1, count))]


def measure_case(
    gpu: Gpu, bench: Bench[Any], case: BenchCase[Any], tiles: TileConfig | None = None
) -> Row:
    """A row of the results: our time, each peer's time or why it has none, what was aimed at."""
    operands = rotated(gpu, case)
    programs: dict[str, Program] = {
        OURS: gpu.timer.capture([_bound_call(bench, one, tiles) for one in operands])
    }
    unavailable: dict[str, str] = {}
    for name, peer in case.peers.items():
        try:
            programs[name] = gpu.timer.capture([peer.prepare(one) for one in operands])
        except Exception as error:  # a peer that a build or a device lacks is a result
            unavailable[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    times = gpu.timer.time(programs, rounds=gpu.rounds)
    ours = times.pop(OURS)
    return {
        "op": bench.op,
        "case": case.name,
        "shape_class": case.shape_class,
        "bytes": case.cost.bytes,
        "operations": case.cost.operations,
        "unit": str(case.unit),
        "copies": len(operands),
        **_microseconds(ours),
        **_roofline(gpu, case, ours),
        "peers": {name: _peer_row(case, name, t, ours) for name, t in times.items()},
        "unavailable": unavailable,
    }


def _bound_call(bench: Bench[Any], operands: Any, tiles: TileConfig | None) -> Callable[[], object]:
    return lambda: bench.call(operands, tiles)


def _microseconds(timing: Timing) -> dict[str, float]:
    return {
        "median_us": round(1e6 * timing.median_s, 3),
        "min_us": round(1e6 * timing.min_s, 3),
        "p80_us": round(1e6 * timing.p80_s, 3),
    }


def _roofline(gpu: Gpu, case: BenchCase[Any], ours: Timing) -> dict[str, object]:
    limit = None if gpu.limits is None else gpu.limits.seconds(case.cost, case.unit)
    if limit is None:
        return {"limit_us": None, "share_of_limit": None}
    return {
        "limit_us": round(1e6 * limit, 3),
        "share_of_limit": round(limit / ours.median_s, 3),
    }


def _peer_row(case: BenchCase[Any], name: str, timing: Timing, ours: Timing) -> dict[str, object]:
    ratio = timing.median_s / ours.median_s
    row: dict[str, object] = {
        **_microseconds(timing),
        "ratio": round(ratio, 3),
        "is_float": case.peers[name].is_float,
    }
    target = case.targets.get(name)
    return row if target is None else {**row, "target": target, "met": ratio >= target}


def float_ratios(rows: Sequence[Row]) -> dict[str, float]:
    """Shape class to speed over float: over the fastest float peer, the least of the class's cases.

    A quantize has no float form: without such a peer it is over the fastest of what would run
    instead, or lowering would never know the kernel as measured.

    Args:
        rows: of `measure_case`, of one kernel.
    """
    found: dict[str, float] = {}
    for row in rows:
        peers: dict[str, dict[str, Any]] = row["peers"]  # type: ignore[assignment]  # by construction
        floats = [peer for peer in peers.values() if peer["is_float"]]
        ratios = [float(peer["ratio"]) for peer in floats or peers.values()]
        if ratios:
            shape_class = str(row["shape_class"])
            found[shape_class] = min(found.get(shape_class, float("inf")), *ratios)
    return found
