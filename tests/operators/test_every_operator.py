"""torch's own samples of its operators, quantized for both files' runtimes and run by them.

`pytest -m slow tests/operators` runs them all; without it some of each kind.
"""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.fuzz.processes import Answerer, Died, Hung
from tests.operators.known import REFUSED
from tests.operators.samples import names

LIMIT_S = 120.0
SAMPLES = 3
SOME = (
    "add",
    "clamp",
    "diagonal_scatter",
    "gather",
    "narrow_copy",
    "index_reduce.mean",
)
"""One of each kind that was wrong once, and two that were not."""
PACKAGES = {"xnnpack": "executorch", "onnx": "onnxruntime"}


@pytest.fixture(scope="module")
def worker() -> Iterator[Answerer]:
    answerer = Answerer("tests.operators.worker", retire_after=100)
    yield answerer
    answerer.close()


def failures(worker: Answerer, name: str, backend: str, count: int) -> list[str]:
    """Outcomes that are not to be: of operators that are known not to run, none."""
    if find_spec(PACKAGES[backend]) is None:
        pytest.skip(f"the extra {backend} is not installed")
    try:
        request = {"name": name, "backend": backend, "count": count}
        outcomes = worker.ask(request, LIMIT_S)["outcomes"]
    except (Died, Hung) as error:
        outcomes = [f"{type(error).__name__}: {error}"]
    if name in REFUSED[backend]:
        return []
    return [f"{at}: {o}" for at, o in enumerate(outcomes) if not o.startswith(("ok", "invalid"))]


@pytest.mark.parametrize("backend", PACKAGES)
@pytest.mark.parametrize("name", SOME)
def test_operator_when_quantized_then_its_runtime_runs_it(worker, name, backend):
    assert not failures(worker, name, backend, 1)


@pytest.mark.slow
@pytest.mark.parametrize("backend", PACKAGES)
@pytest.mark.parametrize("name", names())
def test_every_operator_when_quantized_then_its_runtime_runs_it(worker, name, backend):
    assert not failures(worker, name, backend, SAMPLES)


@pytest.mark.parametrize("backend", PACKAGES)
def test_known_refusals_when_listed_then_of_operators_that_there_are(backend):
    assert {*REFUSED[backend]} <= {*names()}
