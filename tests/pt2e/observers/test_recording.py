import pytest
import torch

from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.pt2e.observers.recording import RecordingObserver
from pt2e_quant.pt2e.observers.reuse_input import ReuseInputObserver


def test_recording_when_the_input_changes_later_then_the_copy_does_not():
    observer = RecordingObserver()
    x = torch.zeros(2)
    assert observer(x) is x
    x.add_(1)
    observer(x)
    assert [t.tolist() for t in observer.get_tensor_value()] == [[0, 0], [1, 1]]


@pytest.mark.parametrize("make", [RecordingObserver, ReuseInputObserver])
def test_qparams_when_no_range_is_gathered_then_refused(make):
    with pytest.raises(UnsupportedError, match="qparams"):
        make().calculate_qparams()


def test_reuse_input_when_fed_then_a_pass_through():
    x = torch.ones(1)
    assert ReuseInputObserver()(x) is x
