import pytest
import torch

from pt2e_quant.core.dtypes import info
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.qparams import QParams, fake_quantize
from pt2e_quant.observers.static.fixed import FIXED_RANGES, FixedQParamsObserver, fixed_qparams


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.uint16])
@pytest.mark.parametrize("operator", sorted(FIXED_RANGES))
def test_fixed_qparams_when_values_are_in_range_then_error_is_within_a_step(operator, dtype):
    limits = info(dtype)
    scale, zero_point = fixed_qparams(operator, limits.quant_min, limits.quant_max)
    qp = QParams.per_tensor(scale, zero_point, limits.quant_min, limits.quant_max, dtype)
    span = FIXED_RANGES[operator]
    x = torch.linspace(span.low, span.high, 1001)
    error = (fake_quantize(x, qp) - x).abs()
    assert error[x <= span.high - scale].max() <= scale * 0.5001
    assert error.max() <= scale
    assert fake_quantize(torch.zeros(1), qp).item() == 0.0


def test_fixed_qparams_when_operator_is_unbounded_then_offers_near_names():
    with pytest.raises(ConfigError, match='did you mean "sigmoid"'):
        fixed_qparams("sigmod", 0, 255)


def test_observer_when_fed_then_gives_what_it_was_made_with():
    observer = FixedQParamsObserver(1 / 256, -128, torch.int8, quant_min=-128, quant_max=127)
    x = torch.tensor([5.0])
    assert observer(x) is x
    assert observer.seen
    scale, zero_point = observer.calculate_qparams()
    assert (scale.item(), zero_point.item()) == (1 / 256, -128)
    assert list(observer.state_dict()) == ["scale", "zero_point"]


@pytest.mark.parametrize("scale", [0.0, -1.0, torch.inf, torch.nan])
def test_observer_when_scale_is_not_positive_then_refuses(scale):
    with pytest.raises(ConfigError, match="positive scale"):
        FixedQParamsObserver(scale, 0)
