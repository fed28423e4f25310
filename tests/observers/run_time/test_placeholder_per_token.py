"""The placeholder of activations that are quantized row by row at run time."""

import pytest
import torch

from pt2e_quant.core.errors import ConfigError, UnsupportedError
from pt2e_quant.observers.run_time.placeholder import PerTokenPlaceholderObserver


def test_when_shown_data_then_hands_it_on_and_has_no_qparams():
    observer = PerTokenPlaceholderObserver()
    x = torch.randn(2, 3)
    assert observer(x) is x
    assert observer.is_dynamic
    assert (observer.quant_min, observer.quant_max) == (-128, 127)
    with pytest.raises(UnsupportedError, match="found at run time"):
        observer.calculate_qparams()


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": torch.uint8},
        {"dtype": torch.int16},
        {"quant_min": -127},
        {"quant_max": 7},
        {"is_dynamic": False},
    ],
)
def test_when_anything_but_dynamic_int8_is_asked_then_refused(wrong):
    with pytest.raises(ConfigError, match="per-token qparams are int8"):
        PerTokenPlaceholderObserver(**wrong)
