import pytest
import torch

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.observers.static.fixed import FixedQParamsObserver


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
