"""a8w4_linear in Triton's interpreter, held to its definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.core.errors import InputError
from pt2e_quant.kernels.a8w4_linear import gpu
from pt2e_quant.kernels.a8w4_linear.gpu import a8w4_linear
from pt2e_quant.kernels.a8w4_linear.op import A8w4Linear
from pt2e_quant.kernels.a8w4_linear.pack import pack_halves, weight_sums
from pt2e_quant.kernels.a8w4_linear.reference import a8w4_linear as reference
from pt2e_quant.kernels.a8w4_linear.reference import split_bound
from pt2e_quant.kernels.tiles import TileConfig
from tests.kernels.grouped_operands import a8w4_operands
from tests.kernels.operands import EXACT_ACTIVATIONS, epilogues


def small(splits):
    """The least tile, cut along K in at most so many parts."""
    blocks = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 128, "GROUP_M": 2, "SPLIT_K": splits}
    return TileConfig(tuple(blocks.items()), num_warps=4, num_stages=2)


@settings(max_examples=25)
@given(st.data(), st.integers(1, 20), st.integers(1, 20), st.booleans())
def test_a8w4_linear_when_shapes_are_ragged_then_equals_the_definition(data, M, N, per_row):
    operands = data.draw(a8w4_operands(M, N, most_k=300, per_row=per_row))
    epilogue = data.draw(epilogues((M, N)))
    made = a8w4_linear(*operands, tiles=small(1), **epilogue)
    wanted = reference(*operands, **epilogue)
    assert made.dtype is wanted.dtype
    is_exact = epilogue["activation"] in EXACT_ACTIVATIONS
    if made.dtype is torch.int8:
        assert (made.int() - wanted.int()).abs().max() <= (0 if is_exact else 1)
    elif made.dtype is torch.bfloat16:  # the interpreter truncates to bfloat16
        torch.testing.assert_close(made, wanted, rtol=2**-7, atol=1e-6)
    elif is_exact:
        assert torch.equal(made, wanted)
    else:
        rtol = 2**-10 if made.dtype is torch.float16 else 2e-6
        torch.testing.assert_close(made, wanted, rtol=rtol, atol=2e-6)


@settings(max_examples=8)
@given(st.data(), st.integers(1, 18), st.integers(1, 18), st.sampled_from([32, 64, 256]))
def test_a8w4_linear_when_k_is_split_then_is_within_the_bound(data, M, N, size):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    K = 12 * 128 if size != 32 else 12 * 64
    weight = torch.randint(-8, 8, (N, K), dtype=torch.int8, generator=generator)
    operands = (
        torch.randint(-128, 128, (M, K), dtype=torch.int8, generator=generator),
        torch.rand(M, generator=generator),
        torch.randint(-128, 128, (M,), dtype=torch.int32, generator=generator),
        pack_halves(weight, 32 if size == 32 else 64),
        scale := torch.rand(K // size, N, generator=generator),
        weight_sums(weight, scale, size),
        size,
    )
    end = {"bias": torch.ones(N), "activation": "relu"}
    made = a8w4_linear(*operands, tiles=small(3), **end)
    wanted = reference(*operands, **end)
    bound = split_bound(*operands, splits=3) + 2**-23 * (wanted.abs() + 1)
    assert ((made - wanted).double().abs() <= bound).all()
    assert torch.equal(made, a8w4_linear(*operands, tiles=small(3), **end))


@pytest.mark.parametrize("as_bits", [True, False])
@pytest.mark.parametrize("size", [32, 256])
def test_a8w4_linear_when_sums_are_greatest_then_either_way_to_float_gives_them(
    monkeypatch, as_bits, size
):
    monkeypatch.setattr(gpu, "sums_as_bits", lambda device: as_bits)
    generator = torch.Generator().manual_seed(size)
    signs = torch.randint(0, 2, (5, 512), generator=generator) * 2 - 1
    weight = torch.where(signs[:4] > 0, 7, -8).to(torch.int8)
    operands = (
        torch.where(signs > 0, 127, -128).to(torch.int8),
        torch.rand(5, generator=generator),
        torch.randint(-128, 128, (5,), dtype=torch.int32, generator=generator),
        pack_halves(weight, 32 if size == 32 else 64),
        scale := torch.rand(512 // size, 4, generator=generator),
        weight_sums(weight, scale, size),
        size,
    )
    assert torch.equal(a8w4_linear(*operands, tiles=small(1)), reference(*operands))


def test_a8w4_linear_when_tiles_are_the_shipped_ones_then_equals_the_definition():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-8, 8, (70, 256), dtype=torch.int8, generator=generator)
    for M in (1, 33):
        operands = (
            torch.randint(-128, 128, (M, 256), dtype=torch.int8, generator=generator),
            torch.rand(M, generator=generator) * 0.01,
            torch.full((M,), -128, dtype=torch.int32),
            pack_halves(weight, 64),
            scale := torch.rand(2, 70, generator=generator),
            weight_sums(weight, scale, 128),
            128,
        )
        end = {"out_dtype": torch.int8, "out_scale": 0.4}
        assert torch.equal(A8w4Linear(*operands, **end), reference(*operands, **end))


def test_a8w4_linear_when_dtypes_are_others_then_refuses():
    one, zero = torch.ones(1), torch.zeros(1, dtype=torch.int32)
    weight, sums = torch.zeros(1, 3, 64, dtype=torch.int8), torch.zeros(3)
    with pytest.raises(InputError, match=r"takes x in torch.int8, found torch.float32"):
        a8w4_linear(torch.zeros(2, 4), one, zero, weight, torch.ones(1, 3), sums, 4)


def test_a8w4_linear_when_shapes_are_others_then_refuses():
    one, zero = torch.ones(1), torch.zeros(1, dtype=torch.int32)
    weight, sums = torch.zeros(1, 3, 64, dtype=torch.int8), torch.zeros(3)
    x = torch.zeros(2, 256, dtype=torch.int8)
    with pytest.raises(InputError, match=r"takes weight of shape \(2, 3, 64\), found \(1, 3, 64\)"):
        a8w4_linear(x, one, zero, weight, torch.ones(2, 3), sums, 128)
    with pytest.raises(InputError, match="takes scales of 1 element or 2, found 3"):
        a8w4_linear(x[:, :128], torch.ones(3), zero, weight, torch.ones(1, 3), sums, 128)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_a8w4_linear_when_there_is_nothing_then_gives_nothing(shape):
    M, N = shape
    made = a8w4_linear(
        torch.zeros(M, 8, dtype=torch.int8),
        torch.ones(1),
        torch.zeros(1, dtype=torch.int32),
        torch.zeros(1, N, 64, dtype=torch.int8),
        torch.ones(1, N),
        torch.zeros(N),
        8,
    )
    assert made.shape == (M, N)
