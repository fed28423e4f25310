"""The packed layout loses nothing, and is where its text says."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.packing import pack, unpack
from pt2e_quant.kernels.int4_linear.pack import check_group_size, pack_codes, unpack_codes


@settings(max_examples=40)
@given(st.integers(0, 9), st.integers(0, 400), st.integers(0, 2**31))
def test_pack_codes_when_unpacked_then_nothing_is_lost(N, K, seed):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (N, K), dtype=torch.uint8, generator=generator)
    packed = pack_codes(codes)
    assert packed.shape == (-(-K // 128), N, 16)
    assert torch.equal(unpack_codes(packed, K), codes)


@given(st.integers(0, 2**31))
@settings(max_examples=5)
def test_stored_weights_when_packed_and_unpacked_then_are_what_they_were(seed):
    generator = torch.Generator().manual_seed(seed)
    stored = torch.randint(0, 256, (6, 100), dtype=torch.uint8, generator=generator)
    signed = unpack(stored, torch.int4, (6, 200))
    undone = unpack_codes(pack_codes((signed.short() + 8).to(torch.uint8)), 200).to(torch.int8) - 8
    assert torch.equal(pack(undone, torch.int4), stored)


def test_pack_codes_when_one_code_is_set_then_it_is_where_the_text_says():
    for k in (0, 1, 31, 32, 33, 127, 128, 200):
        codes = torch.zeros(1, 256, dtype=torch.uint8)
        codes[0, k] = 15
        packed = pack_codes(codes)
        p, j, e = (k % 128) // 32, (k % 32) // 2, k % 2
        word = (15 << (4 * p + 16 * e)) - (2**32 if (p, e) == (3, 1) else 0)
        assert packed.nonzero().tolist() == [[k // 128, 0, j]]
        assert packed[k // 128, 0, j] == word


@pytest.mark.parametrize(("size", "K"), [(16, 64), (96, 192), (128, 192), (0, 64)])
def test_check_group_size_when_groups_do_not_fit_blocks_then_refuses(size, K):
    with pytest.raises(ConfigError, match=f"groups of {size} of {K} do not fit blocks of 128"):
        check_group_size(size, K)


@pytest.mark.parametrize(("size", "K"), [(32, 96), (64, 64), (256, 512), (100, 100)])
def test_check_group_size_when_groups_fit_blocks_then_passes(size, K):
    check_group_size(size, K)
