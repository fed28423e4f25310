import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pt2e_quant.core.cache_ops import PackRows, UnpackRows
from pt2e_quant.core.errors import ConfigError


@given(
    lead=st.lists(st.integers(1, 4), max_size=3),
    octets=st.integers(1, 4),
    bits=st.integers(1, 7),
    is_signed=st.booleans(),
)
def test_rows_when_packed_then_each_in_its_own_bytes_and_back(lead, octets, bits, is_signed):
    low = -(1 << (bits - 1)) if is_signed else 0
    values = torch.randint(low, low + (1 << bits), (*lead, octets * 8))
    values = values.to(torch.int8 if is_signed else torch.uint8)
    packed = PackRows(values, bits, is_signed)
    assert packed.shape == (*lead, octets * bits)
    assert torch.equal(UnpackRows(packed, bits, is_signed), values)
    # One row alone has the same bytes: a position of a cache can be written by itself.
    alone = PackRows(values.reshape(-1, octets * 8)[:1], bits, is_signed)
    assert torch.equal(alone[0], packed.reshape(-1, octets * bits)[0])


def test_operators_when_checked_by_torch_then_proper():
    values = torch.randint(-8, 8, (2, 3, 8), dtype=torch.int8)
    torch.library.opcheck(PackRows, (values, 4, True))
    torch.library.opcheck(UnpackRows, (PackRows(values, 4, True), 4, True))


def test_rows_when_they_fill_no_whole_bytes_then_refused_also_for_fakes():
    for mode in (torch._subclasses.FakeTensorMode(), torch.no_grad()):
        with mode, pytest.raises(ConfigError, match="no whole number"):
            PackRows(torch.zeros(2, 3, dtype=torch.int8), 4, True)
        with mode, pytest.raises(ConfigError, match="no whole number"):
            UnpackRows(torch.zeros(2, 1, dtype=torch.uint8), 3, False)
