"""Scales raised to powers of two, or rounded to fewer bits."""

import pytest
import torch

from pt2e_quant.observers.static.minmax import MinMaxObserver, PerChannelMinMaxObserver
from pt2e_quant.observers.static.rounded_scale import RoundedScaleObserver


@pytest.mark.parametrize("kind", [MinMaxObserver, PerChannelMinMaxObserver])
@pytest.mark.parametrize("symmetric", [True, False])
def test_power_of_two_when_raised_then_covers_what_the_other_covers(kind, symmetric):
    torch.manual_seed(0)
    scope = "per_tensor" if kind is MinMaxObserver else "per_channel"
    qscheme = getattr(torch, f"{scope}_{'symmetric' if symmetric else 'affine'}")
    observer = RoundedScaleObserver(kind, dtype=torch.int8, qscheme=qscheme)
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


@pytest.mark.parametrize("symmetric", [True, False])
def test_precision_when_given_then_the_nearest_scale_of_it(symmetric):
    torch.manual_seed(0)
    qscheme = torch.per_channel_symmetric if symmetric else torch.per_channel_affine
    observer = RoundedScaleObserver(
        PerChannelMinMaxObserver, precision=torch.bfloat16, dtype=torch.int8, qscheme=qscheme
    )
    observer(torch.rand(64, 32) * 3 - 1)
    scale, zero_point = observer.calculate_qparams()
    plain, own = observer.inner.calculate_qparams()
    assert torch.equal(scale, plain.bfloat16().float())
    assert not torch.equal(scale, plain)
    # Of 255 steps one in 256 is 1 at most: what the least value moves by.
    assert bool(((zero_point - own).abs() <= 1).all())
