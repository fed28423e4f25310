"""A random Llama, static int8: one step that rounds otherwise is a hundred thousandth of its signal
in the first block and a thousandth at the end."""

from collections.abc import Iterator

import pytest
import torch

import pt2e_quant as pq
from pt2e_quant.backends.gate import CEILING_DB

pytest.importorskip("transformers")

from benchmarks.cases import llama_case


@pytest.fixture(params=[1, 2])
def threads(request) -> Iterator[int]:
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


@pytest.mark.slow
def test_random_llama_when_lowered_on_any_thread_count_then_accepted(threads):
    case = llama_case(64)
    backend = pq.backends.get("xnnpack")
    prepared = pq.prepare_pt2e(
        torch.export.export(case.model, case.example), backend.quantizer("int8")
    )
    pq.calibrate(prepared, case.calibration, progress=False)
    report = backend.lower(pq.convert_pt2e(prepared)).report
    assert 25 < report.sqnr_canonical_db < CEILING_DB
    assert torch.get_num_threads() == threads
