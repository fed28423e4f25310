"""Drawn models on the backend `xnnpack`: `pytest -m fuzz --models N --start SEED`."""

import pytest

from tests.fuzz.processes import Answerer
from tests.fuzz.seeds import chunks_of, failures_of

pytestmark = pytest.mark.fuzz


def pytest_generate_tests(metafunc):
    chunks = chunks_of("xnnpack", metafunc.config)
    metafunc.parametrize("seeds", chunks, ids=[f"{s[0]}-{s[-1]}" for s in chunks])


def test_models_when_drawn_then_they_agree_with_their_graph_or_are_refused(
    seeds, worker: Answerer, shrink_budget: int
):
    failures = failures_of(seeds, worker, shrink_budget)
    assert not failures, "\n\n".join(failures)
