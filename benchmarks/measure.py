"""Quality and speed of one program against another, measured the same way for everybody."""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Wall time of one call over the rounds of an interleaved run."""

    median_ms: float
    min_ms: float


def sqnr_db(reference: Sequence[Tensor], measured: Sequence[Tensor]) -> float:
    """Return 10 log10(|reference|^2 / |reference - measured|^2) over all tensors together."""
    signal = sum(float(r.double().square().sum()) for r in reference)
    noise = sum(
        float((r.double() - m.double()).square().sum())
        for r, m in zip(reference, measured, strict=True)
    )
    if noise == 0:
        return float("inf")
    if not noise < float("inf"):
        return float("-inf")
    return 10 * float(torch.tensor(signal / noise, dtype=torch.float64).log10())


def mean_cosine(reference: Sequence[Tensor], measured: Sequence[Tensor]) -> float:
    """Return the mean cosine similarity of paired outputs, each flattened."""
    values = [
        float(torch.cosine_similarity(r.double().flatten(), m.double().flatten(), dim=0))
        for r, m in zip(reference, measured, strict=True)
    ]
    return statistics.fmean(values)


def interleave(
    calls: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 100,
    warmup: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Latency]:
    """Time every call once per round, in a shuffled order, so that load on the machine is shared.

    Shuffled and not rotated: a call finds in the caches what the one before it left there, and
    in a rotation that would always be the same one.

    Args:
        calls: What to time, by label.
        rounds: Timed rounds; each runs every call once.
        warmup: Untimed rounds before.
        clock: Seconds; `time.process_time` counts what the process computed.

    Returns:
        The latency of each label, in milliseconds.
    """
    return _latencies(_samples(calls, rounds, warmup, clock, random.Random(0)))


def interleave_loads(
    load: Mapping[str, Callable[[], Callable[[], object]]], *, loads: int = 8, rounds: int = 100
) -> dict[str, Latency]:
    """`interleave` of programs that are loaded anew several times, each time in another order.

    Where a loaded program lies in memory stays as it is as long as it is loaded, and moves its
    time by a percent or two: within one load that would look like a difference of the programs.

    Args:
        load: Makes a call to time, by label.
        loads: How often all are loaded.
        rounds: Timed rounds of all loads together.

    Returns:
        The latency of each label over all loads, in milliseconds.
    """
    order = random.Random(0)
    pooled: dict[str, list[float]] = {label: [] for label in load}
    for _ in range(loads):
        calls = {label: load[label]() for label in order.sample(list(load), len(load))}
        found = _samples(calls, -(-rounds // loads), 3, time.perf_counter, order)
        for label, samples in found.items():
            pooled[label] += samples
    return _latencies(pooled)


def _samples(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    warmup: int,
    clock: Callable[[], float],
    order: random.Random,
) -> dict[str, list[float]]:
    labels = list(calls)
    samples: dict[str, list[float]] = {label: [] for label in labels}
    for number in range(warmup + rounds):
        for label in order.sample(labels, len(labels)):
            begin = clock()
            calls[label]()
            elapsed = clock() - begin
            if number >= warmup:
                samples[label].append(1e3 * elapsed)
    return samples


def _latencies(samples: Mapping[str, list[float]]) -> dict[str, Latency]:
    return {
        label: Latency(median_ms=statistics.median(times), min_ms=min(times))
        for label, times in samples.items()
    }


class Stopwatch:
    """Collects the seconds spent in named stages."""

    def __init__(self) -> None:
        self.stages: dict[str, float] = {}

    def run(self, stage: str, call: Callable[[], T]) -> T:
        """Run `call`, add its seconds to `stage` and return what it returned."""
        begin = time.perf_counter()
        result = call()
        self.stages[stage] = self.stages.get(stage, 0.0) + time.perf_counter() - begin
        return result
