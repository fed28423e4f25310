"""The observer of block weights: what it sees, refuses and hands on."""

import pytest
import torch

from pt2e_quant.core.errors import CalibrationError
from pt2e_quant.core.formats.format_schemes import FORMAT_SCHEMES
from pt2e_quant.observers.base import NonFinite
from pt2e_quant.observers.weights.block_weight import BlockWeightObserver


def test_weight_when_seen_then_its_input_goes_on_and_the_last_one_counts():
    observer = BlockWeightObserver(FORMAT_SCHEMES["mxfp4"].weight)
    with pytest.raises(CalibrationError, match="saw no weight"):
        observer.calculate_qparams()
    first, second = torch.randn(2, 64), torch.randn(2, 64) * 100
    assert observer(first) is first
    scales, zero_points = observer.calculate_qparams()
    assert scales.shape == zero_points.shape == (2, 2)
    observer(second)
    assert bool((observer.calculate_qparams()[0] > scales).all())
    assert observer.max_val == second.max()
    observer.observes_constant = True
    observer(first)
    assert observer.max_val == second.max()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_weight_when_not_finite_then_refused(bad):
    with pytest.raises(NonFinite):
        BlockWeightObserver(FORMAT_SCHEMES["nf4"].weight)(torch.tensor([[bad] * 64]))


@pytest.mark.parametrize("columns", [64, 70])
@pytest.mark.parametrize("name", ["mxfp4", "fp8_weight_only"])
def test_weight_when_its_last_block_is_short_then_its_range_is_that_of_its_values(name, columns):
    observer = BlockWeightObserver(FORMAT_SCHEMES[name].weight)
    weight = torch.rand(2, columns) + 1.0  # filling up with zeros would give a range from 0
    observer(weight)
    assert observer.min_val == weight.min()
    assert observer.max_val == weight.max()
