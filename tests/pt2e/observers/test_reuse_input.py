"""The observer that stands for "has its input's qparams"."""

import pytest
import torch

from pt2e_quant.core.errors import Pt2eQuantError
from pt2e_quant.pt2e.observers.reuse_input import ReuseInputObserver


def test_reuse_input_when_called_then_returns_the_input_and_gathers_nothing():
    observer = ReuseInputObserver()
    x = torch.randn(3)
    assert observer(x) is x
    assert not observer.state_dict()


def test_reuse_input_when_asked_for_qparams_then_refused():
    with pytest.raises(Pt2eQuantError):
        ReuseInputObserver().calculate_qparams()
