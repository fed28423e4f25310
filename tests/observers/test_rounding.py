"""What observers round a tensor to without a graph."""

import pytest
import torch

from pt2e_quant.core.formats.format_schemes import format_scheme_named
from pt2e_quant.observers.rounding import rounded
from pt2e_quant.observers.run_time.placeholder import (
    NoopObserver,
    PlaceholderObserver,
    RunTimeScales,
)
from pt2e_quant.observers.static.minmax import MinMaxObserver
from pt2e_quant.observers.weights.block_weight import BlockWeightObserver

X = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))


def test_rounded_when_static_then_within_half_a_step_of_the_range():
    observer = MinMaxObserver(dtype=torch.int8, qscheme=torch.per_tensor_affine)
    observer(X)
    scale, _ = observer.calculate_qparams()
    error = (rounded(observer, X) - X).abs().max()
    assert 0.4 * float(scale) < float(error) <= 0.501 * float(scale)


@pytest.mark.parametrize("qscheme", [torch.per_tensor_affine, torch.per_tensor_symmetric])
def test_rounded_when_dynamic_then_by_the_range_of_what_is_given(qscheme):
    observer = PlaceholderObserver(dtype=torch.int8, qscheme=qscheme, is_dynamic=True)
    wide = (rounded(observer, X * 1000) - X * 1000).abs().max()
    narrow = (rounded(observer, X) - X).abs().max()
    assert 0 < float(narrow) < 0.02
    assert float(wide / narrow) == pytest.approx(1000, rel=0.05)


def test_rounded_when_the_observer_leaves_it_float_then_the_same():
    assert rounded(PlaceholderObserver(dtype=torch.float32), X) is X


def test_rounded_when_half_precision_then_cast_there_and_back():
    assert torch.equal(rounded(NoopObserver(), X), X.half().float())


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "nf4", "mxfp4"])
def test_rounded_when_in_blocks_then_near_and_of_few_values(name):
    scheme = format_scheme_named(name)
    weight = BlockWeightObserver(scheme.weight)
    weight(X)
    found = [rounded(weight, X)]
    if scheme.input is not None and scheme.input.is_dynamic:
        found.append(rounded(RunTimeScales(scheme.input), X))
    for made in found:
        assert float((made - X).norm() / X.norm()) < 0.2
        assert not torch.equal(made, X)
