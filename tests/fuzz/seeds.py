"""The seeds that a test run searches, and what it says of a failure."""

import pytest

from tests.fuzz.grammar import BACKENDS
from tests.fuzz.processes import Answerer
from tests.fuzz.program import source
from tests.fuzz.search import FAILURES, Result, search, shrunk

__all__ = ["CHUNK", "chunks_of", "failures_of"]

CHUNK = 10
"""Models a test: few enough to end before a test's time limit on a busy machine."""


def chunks_of(backend: str, config: pytest.Config) -> list[range]:
    """The seeds of one backend, in chunks: every third of `--models` from `--start`."""
    start, models = config.getoption("--start"), config.getoption("--models")
    offset = (BACKENDS.index(backend) - start) % len(BACKENDS)
    seeds = range(start + offset, start + models, len(BACKENDS))
    return [seeds[at : at + CHUNK] for at in range(0, len(seeds), CHUNK)]


def failures_of(seeds: range, worker: Answerer, budget: int) -> list[str]:
    """A text for each model that fails: what came of it, and its file, shrunk."""
    found = [r for r in search(iter(seeds), worker) if r.outcome in FAILURES]
    return [_text(shrunk(result, worker, budget) if budget else result) for result in found]


def _text(result: Result) -> str:
    answer = result.answer
    head = f"seed {result.program.seed}: {answer['outcome']} {answer['stage']} {answer['error']}"
    return f"{head}\n{answer['detail']}\n{source(result.program)}"
