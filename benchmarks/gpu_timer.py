"""Time on a GPU: calls in a CUDA graph, each on memory of its own, all programs in turn."""

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = ["GraphTimer", "Program", "Timer", "Timing", "copies_for", "timing_of"]

Call = Callable[[], object]
WARM_UPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of one call over all replays."""

    median_s: float
    min_s: float
    p80_s: float


class Program(Protocol):
    """Calls that can be run again as one; its time is that of all of them."""

    calls: int

    def replay(self) -> None:
        """Run them all."""


class Timer(Protocol):
    """What measures; a test has one of its own."""

    def capture(self, calls: Sequence[Call]) -> Program:
        """Make a program; raises what a call raises."""

    def time(self, programs: Mapping[str, Program], *, rounds: int) -> dict[str, Timing]:
        """Run all programs once a round, in a shuffled order."""


def timing_of(samples: Sequence[float]) -> Timing:
    """The statistics of seconds a call."""
    ordered = sorted(samples)
    return Timing(
        median_s=statistics.median(ordered),
        min_s=ordered[0],
        p80_s=ordered[min(len(ordered) - 1, int(0.8 * len(ordered)))],
    )


def copies_for(operand_bytes: int, *, l2_bytes: int, memory_bytes: int) -> int:
    """How many copies of the operands a program goes through, so that none is still in L2.

    Args:
        operand_bytes: of one call's tensors.
        l2_bytes: of the device's second cache.
        memory_bytes: what all copies of one program may take.

    >>> copies_for(33_000_000, l2_bytes=50_000_000, memory_bytes=10**10)
    5
    """
    wanted = -(-3 * l2_bytes // max(1, operand_bytes))
    most = max(1, memory_bytes // max(1, operand_bytes))
    return max(1, min(wanted, most, 128))


@dataclass(frozen=True, slots=True)
class GraphProgram:
    """Calls captured in one CUDA graph."""

    graph: torch.cuda.CUDAGraph
    calls: int

    def replay(self) -> None:
        """Run them all."""
        self.graph.replay()


class GraphTimer:
    """Captures calls in CUDA graphs and times replays with CUDA events.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def capture(self, calls: Sequence[Call]) -> GraphProgram:
        """Run each call some times on a side stream, then record all of them in one graph."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                for call in calls:
                    call()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return GraphProgram(graph, len(calls))

    def time(self, programs: Mapping[str, Program], *, rounds: int) -> dict[str, Timing]:
        """Interleaved, so that a clock that drifts drifts for all."""
        labels = list(programs)
        samples: dict[str, list[float]] = {label: [] for label in labels}
        order = random.Random(0)
        for number in range(WARM_UPS + rounds):
            marks = []
            for label in order.sample(labels, len(labels)):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                programs[label].replay()
                end.record()
                marks.append((label, begin, end))
            torch.cuda.synchronize(self.device)
            if number >= WARM_UPS:
                for label, begin, end in marks:
                    seconds = begin.elapsed_time(end) / 1e3
                    samples[label].append(seconds / programs[label].calls)
        return {label: timing_of(times) for label, times in samples.items()}
