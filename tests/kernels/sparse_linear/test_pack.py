import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.kernels.sparse_linear.pack import (
    PAIRS,
    pack_places,
    pack_sparse,
    unpack_places,
    unpack_sparse,
)
from pt2e_quant.kernels.sparse_linear.reference import INT4


@given(st.data(), st.integers(1, 5), st.integers(0, 20), st.sampled_from([torch.int8, INT4]))
def test_pack_when_two_of_four_are_kept_then_unpack_gives_the_codes(data, N, fours, dtype):
    most = 127 if dtype == torch.int8 else 7
    codes = torch.zeros(N, fours, 4, dtype=torch.int8)
    for row in codes:
        for four in row:
            for place in data.draw(st.sampled_from(PAIRS)):
                four[place] = data.draw(st.integers(-most - 1, most))
    codes = codes.view(N, 4 * fours)
    values, pairs = pack_sparse(codes, dtype)
    assert torch.equal(unpack_sparse(values, pairs, dtype, 4 * fours), codes)
    assert pairs.shape == (N, -(-3 * fours // 8))


def test_pack_when_three_of_four_hold_values_then_refused():
    with pytest.raises(ConfigError, match="more than two values"):
        pack_sparse(torch.tensor([[1, 1, 1, 0]], dtype=torch.int8), torch.int8)


@given(st.data(), st.integers(1, 5), st.integers(0, 20))
def test_places_when_three_fill_a_byte_then_come_back(data, N, count):
    flat = data.draw(st.lists(st.integers(0, 5), min_size=N * count, max_size=N * count))
    places = torch.tensor(flat, dtype=torch.uint8).view(N, count)
    packed = pack_places(places)
    assert packed.shape == (-(-N * count // 3),)
    assert torch.equal(unpack_places(packed, (N, count)), places)
