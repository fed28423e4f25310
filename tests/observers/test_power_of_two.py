"""Scales raised to powers of two."""

import pytest
import torch

from pt2e_quant.observers.minmax import MinMaxObserver, PerChannelMinMaxObserver
from pt2e_quant.observers.power_of_two import PowerOfTwoObserver


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
