"""int4_linear in Triton's interpreter, held to its definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.core.errors import ConfigError, InputError
from pt2e_quant.kernels.int4_linear.gpu import int4_linear
from pt2e_quant.kernels.int4_linear.op import Int4Linear
from pt2e_quant.kernels.int4_linear.pack import pack_codes
from pt2e_quant.kernels.int4_linear.reference import error_bound
from pt2e_quant.kernels.int4_linear.reference import int4_linear as reference
from pt2e_quant.kernels.tiles import TileConfig
from tests.kernels.grouped_operands import int4_operands
from tests.kernels.operands import epilogues


def small(splits):
    """The least tile, cut along K in at most so many runs."""
    blocks = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 128, "GROUP_M": 2, "SPLIT_K": splits}
    return TileConfig(tuple(blocks.items()), num_warps=4, num_stages=2)


@settings(max_examples=20)
@given(st.data(), st.integers(1, 20), st.integers(1, 20))
def test_int4_linear_when_shapes_are_ragged_then_sums_are_within_the_bound(data, M, N):
    operands = data.draw(int4_operands(M, N, most_k=300))
    made = int4_linear(*operands, tiles=small(1))
    wanted = reference(*operands)
    error = (made.double() - wanted.double()).abs()
    assert (error <= error_bound(*operands, splits=1) + wanted.abs() * 2**-24).all()


@settings(max_examples=10)
@given(st.data(), st.integers(1, 18), st.integers(1, 18))
def test_int4_linear_when_k_is_split_then_the_whole_result_is_within_the_bound(data, M, N):
    operands = data.draw(int4_operands(M, N, most_k=128))
    x, weight, scale, zero_point, size = operands
    # Twelve blocks in three runs: the same weights over and over.
    x = torch.nn.functional.pad(x, (0, 128 * (len(weight) - 1) + 128 - x.shape[1])).repeat(1, 12)
    if size not in (32, 64, 128) or x.shape[1] != 12 * 128 or len(scale) * size != 128:
        scale, zero_point, size = scale[:1].repeat(12, 1), None, 128
    else:
        scale = scale.repeat(12, 1)
        zero_point = None if zero_point is None else zero_point.repeat(12, 1)
    operands = (x, weight.repeat(12, 1, 1), scale, zero_point, size)
    end = data.draw(epilogues((M, N)))
    end = {**end, "activation": "relu", "limits": [], "out_dtype": torch.float32}
    made = int4_linear(*operands, tiles=small(3), **end)
    wanted = reference(*operands, **end)
    # relu and the sums with bias and residual enlarge no error but by their own roundings.
    bound = error_bound(*operands, splits=3) + 2**-22 * (wanted.abs() + 4)
    assert ((made - wanted).double().abs() <= bound).all()
    assert torch.equal(made, int4_linear(*operands, tiles=small(3), **end))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
def test_int4_linear_when_tiles_are_the_shipped_ones_then_every_result_dtype_holds(dtype):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (70, 256), dtype=torch.uint8, generator=generator)
    scale = torch.rand(2, 70, generator=generator) * 0.01 + 0.01
    for M in (1, 33):
        x = torch.randn(M, 256, generator=generator)
        operands = (x, pack_codes(codes), scale, None, 128)
        end = {"out_dtype": dtype, "out_scale": 0.05}
        made, wanted = Int4Linear(*operands, **end), reference(*operands, **end)
        if dtype is torch.int8:  # a sum near the middle of two steps may go to either
            assert (made.int() - wanted.int()).abs().max() <= 1
        else:
            torch.testing.assert_close(made, wanted, rtol=2**-10, atol=1e-5)


def test_int4_linear_when_given_what_it_does_not_take_then_refuses():
    weight, scale = torch.zeros(1, 3, 16, dtype=torch.int32), torch.ones(2, 3)
    with pytest.raises(InputError, match=r"takes weight in torch.int32, found torch.int8"):
        int4_linear(torch.zeros(2, 64), weight.to(torch.int8), scale, None, 32)
    with pytest.raises(ConfigError, match="groups of 16 of 64 do not fit"):
        int4_linear(torch.zeros(2, 64), weight, scale, None, 16)
    with pytest.raises(InputError, match=r"takes weight of shape \(2, 3, 16\), found \(1, 3, 16\)"):
        int4_linear(torch.zeros(2, 256), weight, scale, None, 128)
    with pytest.raises(InputError, match=r"takes bias of shape \(3,\), found \(4,\)"):
        int4_linear(torch.zeros(2, 64), weight, scale, None, 32, bias=torch.zeros(4))


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_int4_linear_when_there_is_nothing_then_gives_nothing(shape):
    M, N = shape
    made = int4_linear(
        torch.zeros(M, 64), torch.zeros(1, N, 16, dtype=torch.int32), torch.ones(1, N), None, 64
    )
    assert made.shape == (M, N)
