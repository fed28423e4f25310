"""The packed layout loses nothing; four of its bytes are eight int8 after three instructions."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.core.packing import pack, unpack
from pt2e_quant.kernels.a8w4_linear.pack import (
    half_of,
    pack_halves,
    run_of,
    unpack_halves,
    weight_sums,
)
from tests.kernels.operands import integers


@settings(max_examples=40)
@given(st.data(), st.integers(0, 9), st.integers(0, 300), st.sampled_from([32, 64]))
def test_pack_halves_when_unpacked_then_nothing_is_lost(data, N, K, half):
    weight = data.draw(integers((N, K), -8, 7))
    packed = pack_halves(weight, half)
    assert packed.shape == (-(-K // (2 * half)), N, half)
    assert torch.equal(unpack_halves(packed, K), weight)
    stored = pack(weight, torch.int4)
    assert torch.equal(pack(unpack_halves(packed, K), torch.int4), stored)
    assert torch.equal(unpack(stored, torch.int4, (N, K)), weight)


def test_packed_word_when_masked_and_shifted_then_gives_both_halves_sixteen_times_too_large():
    weight = torch.arange(-64, 64).remainder(16).sub(8).to(torch.int8).reshape(1, 128)
    word = pack_halves(weight, 64).view(torch.int32)[0, 0]
    low, high = (word << 4) & -252645136, word & -252645136
    assert torch.equal(low.view(torch.int8), 16 * weight[0, :64])
    assert torch.equal(high.view(torch.int8), 16 * weight[0, 64:])


def test_runs_when_groups_are_of_any_size_then_have_at_most_128_weights():
    wanted = {(32, 96): (32, 32), (64, 64): (64, 128), (64, 128): (64, 64), (256, 512): (64, 128)}
    found = {(size, K): (half_of(size, K), run_of(size, K)) for size, K in wanted}
    assert found == wanted


def test_weight_sums_when_groups_have_scales_then_are_of_scaled_rows():
    weight = torch.tensor([[1, 2, 3, 4], [-8, -8, 7, 0]], dtype=torch.int8)
    scale = torch.tensor([[1.0, 2.0], [0.5, 0.25]], dtype=torch.bfloat16)
    assert weight_sums(weight, scale, 2).tolist() == [3.0 + 3.5, -32.0 + 1.75]
    assert (
        weight_sums(torch.zeros(3, 0, dtype=torch.int8), torch.ones(0, 3), 0).tolist() == [0.0] * 3
    )
