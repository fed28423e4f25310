"""The models that once failed, each shrunk to what made it fail."""

from pathlib import Path

import pytest

from tests.fuzz.processes import Answerer
from tests.fuzz.search import FAILURES, run_source

pytestmark = pytest.mark.fuzz
CORPUS = Path(__file__).parent / "corpus"


@pytest.mark.parametrize("name", sorted(p.stem for p in CORPUS.glob("*.py")))
def test_model_when_it_failed_once_then_it_agrees_or_is_refused(name, worker: Answerer):
    answer = run_source((CORPUS / f"{name}.py").read_text(), worker)
    assert answer["outcome"] not in (*FAILURES, "invalid"), answer["detail"]
