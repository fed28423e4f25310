"""The observer that stands for "has its input's qparams"."""

import pytest
import torch

from pt2e_quant.core.errors import Pt2eQuantError
from pt2e_quant.pt2e.observers.reuse_input import ReuseInputObserver


def test_input_comes_back_and_nothing_is_gathered():
    observer = ReuseInputObserver()
    x = torch.randn(3)
    assert observer(x) is x
    assert not observer.state_dict()


def test_it_has_no_qparams_of_its_own():
    with pytest.raises(Pt2eQuantError):
        ReuseInputObserver().calculate_qparams()
