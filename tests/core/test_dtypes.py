from types import SimpleNamespace

import pytest
import torch

from pt2e_quant.core.dtypes import DTYPES, info, used_limits
from pt2e_quant.core.errors import UnsupportedError


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16])
def test_info_when_torch_computes_in_it_then_limits_are_torch_iinfo(dtype):
    row, limits = info(dtype), torch.iinfo(dtype)
    assert (row.quant_min, row.quant_max, row.bits) == (limits.min, limits.max, limits.bits)
    assert row.storage == dtype
    assert not row.is_sub_byte


def test_info_when_sub_byte_then_stored_in_a_byte_that_holds_its_limits():
    for row in DTYPES.values():
        limits = torch.iinfo(row.storage)
        assert limits.min <= row.quant_min < row.quant_max <= limits.max
        assert row.quant_max - row.quant_min + 1 == 1 << row.bits
        assert row.signed == (row.quant_min < 0)
    assert (info(torch.int4).quant_min, info(torch.uint4).quant_max) == (-8, 15)
    assert info(torch.int4).storage == torch.int8


def test_info_when_quantized_tensor_dtype_then_the_plain_one():
    assert info(torch.qint8) is info(torch.int8)
    assert info(torch.quint4x2) is info(torch.uint4)


def test_info_when_not_an_integer_then_names_what_is():
    with pytest.raises(UnsupportedError, match=r"float32[^$]*use one of int1"):
        info(torch.float32)


def test_holds_when_range_is_outside_then_false():
    assert info(torch.int4).holds(-7, 7)
    assert not info(torch.int4).holds(-8, 8)
    assert not info(torch.int8).holds(5, 4)


@pytest.mark.parametrize(
    ("low", "high", "used"),
    [(None, None, (-128, 127)), (-127, None, (-127, 127)), (0, 15, (0, 15))],
)
def test_limits_when_an_observer_names_some_then_the_others_are_its_dtypes(low, high, used):
    observer = SimpleNamespace(dtype=torch.int8, quant_min=low, quant_max=high)
    assert used_limits(observer) == used
