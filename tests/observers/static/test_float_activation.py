"""The range of activations that become small floats."""

import pytest
import torch

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.formats.format_schemes import FORMAT_SCHEMES
from pt2e_quant.observers.static.float_activation import FloatActivationObserver


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
