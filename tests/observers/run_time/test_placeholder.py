import pytest
import torch

from pt2e_quant.core.errors import Pt2eQuantWarning, UnsupportedError
from pt2e_quant.observers.run_time.placeholder import NoopObserver, PlaceholderObserver


@pytest.mark.parametrize("make", [PlaceholderObserver, NoopObserver])
def test_forward_when_fed_then_gathers_nothing(make):
    observer = make(dtype=torch.float16)
    x = torch.tensor([torch.nan])
    assert observer(x) is x
    assert observer.seen
    assert not observer.state_dict()
    with pytest.raises(UnsupportedError, match="gathers nothing"):
        observer.calculate_qparams()


def test_placeholder_when_compute_dtype_is_given_then_dynamic():
    with pytest.warns(Pt2eQuantWarning, match="is_dynamic"):
        observer = PlaceholderObserver(torch.int8, "", torch.int8)
    assert observer.is_dynamic
