"""The observers of block schemes as observers: what they see, refuse and hand on."""

from dataclasses import replace

import pytest
import torch

from pt2e_quant.core.errors import CalibrationError, ConfigError, UnsupportedError
from pt2e_quant.core.format_schemes import FORMAT_SCHEMES
from pt2e_quant.core.scale_format import ScaleFormat
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.observers.base import NonFinite
from pt2e_quant.observers.block_weight import BlockWeightObserver
from pt2e_quant.observers.float_activation import FloatActivationObserver
from pt2e_quant.observers.minmax import MinMaxObserver, PerChannelMinMaxObserver
from pt2e_quant.observers.power_of_two import PowerOfTwoObserver
from pt2e_quant.observers.run_time_scales import RunTimeScales


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


def test_activation_when_batches_come_then_the_greatest_magnitude_becomes_the_greatest_code():
    observer = FloatActivationObserver(FORMAT_SCHEMES["fp8"].input)
    assert not observer.seen
    observer(torch.tensor([[1.0, -3.0]]))
    observer(torch.tensor([[2.0, 0.5]]))
    scale, _ = observer.calculate_qparams()
    assert scale.item() * 448 == pytest.approx(3.0)
    assert observer.block_qparams(3).scale.values.shape == (1, 1, 1)
    restored = FloatActivationObserver(FORMAT_SCHEMES["fp8"].input)
    restored.load_state_dict(observer.state_dict())
    assert restored.block_qparams(1).scale.values.item() == scale.item()


@pytest.mark.parametrize("name", ["fp8_dynamic", "mxfp8", "nvfp4"])
def test_activation_when_not_static_per_tensor_then_refused(name):
    with pytest.raises(ConfigError, match="small floats per tensor"):
        FloatActivationObserver(FORMAT_SCHEMES[name].input)


def test_run_time_scales_when_asked_for_qparams_then_refused():
    observer = RunTimeScales(FORMAT_SCHEMES["mxfp8"].input)
    x = torch.randn(2, 32)
    assert observer(x) is x
    with pytest.raises(UnsupportedError, match="at run time"):
        observer.calculate_qparams()


def test_run_time_scales_when_of_code_books_or_affine_integers_then_refused():
    dynamic = replace(FORMAT_SCHEMES["nf4"].weight, is_dynamic=True)
    affine = replace(scheme_named("int8_dynamic").input, scales=ScaleFormat(dtype=torch.float16))
    for scheme in (dynamic, affine):
        with pytest.raises(ConfigError, match="found at run time"):
            RunTimeScales(scheme)


@pytest.mark.parametrize("kind", [MinMaxObserver, PerChannelMinMaxObserver])
@pytest.mark.parametrize("symmetric", [True, False])
def test_power_of_two_when_raised_then_covers_what_the_other_covers(kind, symmetric):
    torch.manual_seed(0)
    scope = "per_tensor" if kind is MinMaxObserver else "per_channel"
    qscheme = getattr(torch, f"{scope}_{'symmetric' if symmetric else 'affine'}")
    observer = PowerOfTwoObserver(kind, dtype=torch.int8, qscheme=qscheme)
    x = torch.rand(4, 32) * 3 - 1
    assert observer(x) is x
    scale, zero_point = observer.calculate_qparams()
    plain, _ = observer.inner.calculate_qparams()
    assert bool((torch.frexp(scale).mantissa == 0.5).all())
    assert bool(((scale >= plain) & (scale < 2 * plain)).all())
    low = (observer.quant_min - zero_point) * scale
    high = (observer.quant_max - zero_point) * scale
    rows = x if kind is PerChannelMinMaxObserver else x.reshape(1, -1)
    # The zero_point is rounded: half a step at either end.
    assert bool((low <= rows.amin(1).clamp(max=0) + scale / 2).all())
    assert bool((high >= rows.amax(1).clamp(min=0) - scale / 2).all())
