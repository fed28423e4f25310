"""Runs with other values in the place of observers, and the error they make at the output."""

from math import inf, log10

import pytest
import torch

from pt2e_quant.core.qparams import QParams
from pt2e_quant.passes.algorithms.observed_run import OutputError, rounded_by


@pytest.mark.parametrize(("scale", "zero_point"), [(0.013, 3), (0.5, -128), (1e-9, 127)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounded_by_when_values_fit_or_clip_then_as_quantize_and_dequantize(
    scale, zero_point, dtype
):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    qparams = QParams(
        scale=torch.tensor([scale]),
        zero_point=torch.tensor([zero_point], dtype=torch.int32),
        quant_min=-128,
        quant_max=127,
        dtype=torch.int8,
    )
    exact = torch.fake_quantize_per_tensor_affine(x.float(), scale, zero_point, -128, 127)
    found = rounded_by(qparams, x)
    assert found.dtype == dtype
    torch.testing.assert_close(found, exact.to(dtype), rtol=1e-6, atol=0)


def _error(noises):
    return OutputError([1.0] * len(noises), noises)


def test_output_error_when_calls_are_added_then_weighted_and_together():
    error = OutputError()
    error.add([torch.ones(4)], [torch.ones(4) + 0.1], 2.0)
    error.add([torch.ones(4)], [torch.ones(4)], 1.0)
    assert error.db == pytest.approx(10 * log10(12 / (2 * 4 * 0.01)))
    assert (error + error).db == pytest.approx(error.db)
    assert OutputError().db == inf


def test_sure_gain_when_each_call_gains_the_same_then_all_of_it():
    before = _error([1.0, 2.0, 3.0, 4.0])
    assert _error([0.5, 1.0, 1.5, 2.0]).sure_gain(before) == pytest.approx(10 * log10(2))


def test_sure_gain_when_one_call_makes_the_gain_then_none():
    before, after = _error([1.0, 1.0, 1.0, 10.0]), _error([1.2, 1.2, 1.2, 5.0])
    assert after.db > before.db + 1
    assert after.sure_gain(before) < 0
