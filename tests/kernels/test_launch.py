"""What launches refuse: GPUs without 8-bit floats."""

import pytest
import torch

from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.kernels.launch import check_fp8

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(("found", "capability"), [((8, 9), 89), ((9, 0), 90), ((12, 0), 120)])
def test_gpus_with_8_bit_floats_say_their_capability(monkeypatch, found, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found)
    assert check_fp8("fp8_linear", GPU) == capability


@pytest.mark.parametrize("found", [(8, 0), (8, 6), (7, 5)])
def test_older_ones_are_refused_with_the_reason(monkeypatch, found):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an A100")
    with pytest.raises(UnsupportedError, match=r"8\.9 \(Ada\) or later for 8-bit floats, found an"):
        check_fp8("fp8_linear", GPU)


def test_the_interpreter_has_no_capability():
    assert check_fp8("fp8_linear", torch.device("cpu")) == 0
