"""What launches refuse: GPUs without 8-bit floats."""

import pytest
import torch

from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.kernels.launch import check_fp8

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(("found", "capability"), [((8, 9), 89), ((9, 0), 90), ((12, 0), 120)])
def test_check_fp8_when_the_gpu_has_8_bit_floats_then_gives_its_capability(
    monkeypatch, found, capability
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found)
    assert check_fp8("fp8_linear", GPU) == capability


@pytest.mark.parametrize("found", [(8, 0), (8, 6), (7, 5)])
def test_check_fp8_when_the_gpu_is_older_then_refuses_with_the_reason(monkeypatch, found):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an A100")
    with pytest.raises(UnsupportedError, match=r"8\.9 \(Ada\) or later for 8-bit floats, found an"):
        check_fp8("fp8_linear", GPU)


def test_check_fp8_when_in_the_interpreter_then_gives_no_capability():
    assert check_fp8("fp8_linear", torch.device("cpu")) == 0
