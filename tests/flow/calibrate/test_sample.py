"""SQNR, and samples where calibration kept none."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.export import export

from pt2e_quant.flow.calibrate.sample import sample_of, sqnr_db


@given(st.integers(-40, 60))
def test_sqnr_when_noise_is_known_then_the_ratio_of_powers(decibels):
    reference = torch.ones(100, dtype=torch.float64)
    noise = 10 ** (-decibels / 20)
    assert sqnr_db(reference, reference + noise) == pytest.approx(decibels, abs=1e-6)


def test_sqnr_when_equal_then_infinite_and_nan_for_another_structure():
    x = torch.randn(4)
    assert sqnr_db({"a": x, "b": 3}, {"a": x.clone(), "b": 3}) == math.inf
    assert math.isnan(sqnr_db([x], [x, x]))
    assert sqnr_db([x], [x / 0]) == -math.inf
    assert math.isnan(sqnr_db([x], [x * math.nan]))
    assert math.isnan(sqnr_db(x, x[:2]))
    assert math.isnan(sqnr_db(x, x * float("nan")))


def test_sqnr_when_numbers_are_complex_then_both_parts_count():
    reference = torch.complex(torch.ones(100), torch.zeros(100))
    assert sqnr_db(reference, reference + 0.1j) == pytest.approx(20, abs=1e-4)
    assert sqnr_db(reference.conj(), reference + 0.1j) == pytest.approx(20, abs=1e-4)
    assert math.isnan(sqnr_db(reference, reference.real))


def test_sqnr_when_entries_are_masked_then_the_rest_still_counts():
    least = torch.finfo(torch.float32).min
    a = torch.tensor([1.0, 2.0, least])
    assert sqnr_db(a, torch.tensor([1.1, 2.0, least])) == pytest.approx(27, abs=1)


def test_sample_when_there_was_no_call_then_noise_fits_the_captured_one():
    class Embed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(5, 3)

        def forward(self, ids, x, keep):
            return self.table(ids) + x * keep

    inputs = (torch.tensor([0, 4]), torch.randn(2, 3), torch.tensor([[True], [False]]))
    gm = export(Embed(), inputs).module()
    sample = sample_of(gm)
    assert sample.float_outputs is None
    gm(*sample.leaves)
    assert sample.leaves[1].std() > 0
