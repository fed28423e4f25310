"""sparse_linear in Triton's interpreter, held to its definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.core.errors import ConfigError, InputError
from pt2e_quant.kernels.sparse_linear.gpu import sparse_linear
from pt2e_quant.kernels.sparse_linear.op import SparseLinear
from pt2e_quant.kernels.sparse_linear.pack import pack_sparse
from pt2e_quant.kernels.sparse_linear.reference import INT4, dequantize_weight
from pt2e_quant.kernels.sparse_linear.reference import sparse_linear as reference
from pt2e_quant.kernels.tiles import TileConfig


def small(splits):
    """The least tile, cut along K in at most so many runs."""
    blocks = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 32, "GROUP_M": 2, "SPLIT_K": splits}
    return TileConfig(tuple(blocks.items()), num_warps=4, num_stages=2)


def operands(M, N, K, dtype, groups=1, of_x=torch.float32):
    generator = torch.Generator().manual_seed(M * N * K)
    most = 127 if dtype == torch.int8 else 7
    codes = torch.randint(-most - 1, most + 1, (N, K // 4, 4), generator=generator)
    least = torch.rand(codes.shape, generator=generator).topk(2, dim=2).indices
    codes = codes.scatter(2, least, 0).reshape(N, K).to(torch.int8)
    x = torch.randn(M, K, generator=generator).to(of_x)
    scale = torch.rand(N, groups, generator=generator) + 0.1
    return x, *pack_sparse(codes, dtype), scale


def bound(x, values, pairs, scale):
    """Float32 sums of K products in any order, and the roundings of scales and splits."""
    K = x.shape[1]
    real = dequantize_weight(values, pairs, scale, K)
    return (x.double().abs() @ real.double().abs().t()) * (K + 8) * 2**-23


@settings(max_examples=20)
@given(
    st.integers(1, 20), st.integers(1, 20), st.integers(1, 40), st.sampled_from([torch.int8, INT4])
)
def test_sparse_linear_when_shapes_are_ragged_then_sums_are_within_the_bound(M, N, fours, dtype):
    given_ = operands(M, N, 4 * fours, dtype)
    found, wanted = sparse_linear(*given_, tiles=small(1)), reference(*given_)
    assert ((found - wanted).double().abs() <= bound(*given_)).all()


@pytest.mark.parametrize("dtype", [torch.int8, INT4])
@pytest.mark.parametrize("groups", [1, 4, 8])
def test_sparse_linear_when_k_is_split_and_scaled_by_groups_then_within_the_bound(dtype, groups):
    given_, bias = operands(5, 18, 512, dtype, groups), torch.arange(18.0)
    found = sparse_linear(*given_, bias=bias, tiles=small(3))
    error = (found - reference(*given_, bias=bias)).double().abs()
    assert (error <= bound(*given_) + 2**-22 * (found.abs() + 32)).all()
    assert torch.equal(found, sparse_linear(*given_, bias=bias, tiles=small(3)))


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
def test_sparse_linear_when_tiles_are_the_shipped_ones_then_every_dtype_holds(kind):
    for M in (1, 33):
        given_ = operands(M, 70, 256, torch.int8, of_x=kind)
        found = SparseLinear(*given_)
        assert found.dtype == kind
        torch.testing.assert_close(found, reference(*given_), rtol=2**-7, atol=0.1)


def test_sparse_linear_when_given_what_it_does_not_take_then_refuses():
    x, values, pairs, scale = operands(2, 3, 64, torch.int8)
    with pytest.raises(InputError, match=r"takes values of shape \(3, 32\), found \(3, 16\)"):
        sparse_linear(x, values[:, :16], pairs, scale)
    with pytest.raises(ConfigError, match="takes no rows of 64 in 4 groups"):
        sparse_linear(x, values, pairs, torch.ones(3, 4))
    with pytest.raises(InputError, match=r"takes pairs in torch\.uint8"):
        sparse_linear(x, values, pairs.int(), scale)
