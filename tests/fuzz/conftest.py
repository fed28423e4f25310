"""The process that runs drawn models, one for each test process."""

from collections.abc import Iterator

import pytest

from tests.fuzz.processes import Answerer


@pytest.fixture(scope="session")
def worker() -> Iterator[Answerer]:
    answerer = Answerer("tests.fuzz.worker")
    yield answerer
    answerer.close()


@pytest.fixture
def shrink_budget(request: pytest.FixtureRequest) -> int:
    """Trials to shrink a failure: where the search was asked for by hand."""
    return int(request.config.getoption("--shrink"))
