"""int8_linear in Triton's interpreter, held to its definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.core.errors import InputError
from pt2e_quant.kernels.int8_linear.gpu import int8_linear
from pt2e_quant.kernels.int8_linear.op import Int8Linear
from pt2e_quant.kernels.int8_linear.reference import int8_linear as reference
from pt2e_quant.kernels.tiles import TileConfig
from tests.kernels.operands import EXACT_ACTIVATIONS, epilogues, linear_operands

BLOCKS = (("BLOCK_M", 16), ("BLOCK_N", 16), ("BLOCK_K", 32), ("GROUP_M", 2))
SMALL = TileConfig((*BLOCKS, ("SPLIT_K", 1)), num_warps=4, num_stages=2)
CUT = TileConfig((*BLOCKS, ("SPLIT_K", 8)), num_warps=4, num_stages=2)


@settings(max_examples=40)
@given(st.data(), st.integers(1, 40), st.integers(1, 40), st.integers(1, 80), st.booleans())
def test_int8_linear_when_shapes_are_ragged_then_equals_the_definition(data, M, N, K, per_row):
    operands = data.draw(linear_operands(M, N, K, per_row=per_row))
    epilogue = data.draw(epilogues((M, N)))
    made = int8_linear(*operands, tiles=SMALL, **epilogue)
    wanted = reference(*operands, **epilogue)
    assert made.dtype is wanted.dtype
    assert made.shape == wanted.shape
    if made.dtype is torch.int8:
        bound_lsb = 0 if epilogue["activation"] in EXACT_ACTIVATIONS else 1
        assert (made.int() - wanted.int()).abs().max() <= bound_lsb
    elif made.dtype is torch.bfloat16:  # the interpreter truncates to bfloat16
        torch.testing.assert_close(made, wanted, rtol=2**-7, atol=1e-6)
    else:
        rtol = 2**-10 if made.dtype is torch.float16 else 2e-6
        torch.testing.assert_close(made, wanted, rtol=rtol, atol=2e-6)


@settings(max_examples=10)
@given(st.data(), st.integers(1, 20), st.integers(1, 20), st.integers(250, 600), st.booleans())
def test_int8_linear_when_a_product_is_cut_along_k_then_equals_the_definition(
    data, M, N, K, per_row
):
    operands = data.draw(linear_operands(M, N, K, per_row=per_row))
    epilogue = {**data.draw(epilogues((M, N))), "activation": "relu", "limits": []}
    epilogue["out_dtype"] = data.draw(st.sampled_from([torch.int8, torch.float32]))
    made = int8_linear(*operands, tiles=CUT, **epilogue)
    assert torch.equal(made, reference(*operands, **epilogue))


def test_int8_linear_when_tiles_are_the_shipped_ones_then_equals_the_definition():
    generator = torch.Generator().manual_seed(0)
    for M, K in ((1, 130), (1, 4100), (33, 130), (200, 130), (300, 130)):
        x = torch.randint(-128, 128, (M, K), dtype=torch.int8, generator=generator)
        weight = torch.randint(-128, 128, (70, K), dtype=torch.int8, generator=generator)
        operands = (
            x,
            torch.tensor([0.02]),
            torch.tensor([-128], dtype=torch.int32),
            weight,
            torch.rand(70, generator=generator) * 0.01,
            weight.sum(1, dtype=torch.int32),
        )
        end = {"out_dtype": torch.int8, "out_scale": 0.4}
        assert torch.equal(Int8Linear(*operands, **end), reference(*operands, **end))


def test_int8_linear_when_scales_of_rows_are_a_column_then_takes_them():
    weight = torch.arange(-6, 6, dtype=torch.int8).reshape(3, 4)
    x = torch.arange(-12, 12, dtype=torch.int8).reshape(2, 3, 4)
    scale, zero = torch.rand(2, 3, 1), torch.arange(6, dtype=torch.int32).reshape(2, 3, 1)
    rest = (weight, torch.ones(3), weight.sum(1, dtype=torch.int32))
    made = int8_linear(x, scale, zero, *rest, tiles=SMALL)
    assert torch.equal(made, reference(x, scale, zero, *rest))


def test_int8_linear_when_dtypes_are_others_then_refuses():
    one, zero = torch.ones(1), torch.zeros(1, dtype=torch.int32)
    weight = torch.zeros(3, 4, dtype=torch.int8)
    with pytest.raises(InputError, match=r"takes x in torch.int8, found torch.float32"):
        int8_linear(torch.zeros(2, 4), one, zero, weight, torch.ones(3), zero.expand(3))


def test_int8_linear_when_shapes_do_not_go_together_then_refuses():
    weight, one = torch.zeros(3, 4, dtype=torch.int8), torch.ones(1)
    zero, sums = torch.zeros(1, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    with pytest.raises(InputError, match=r"takes x of shape \(2, 4\), found \(2, 6\)"):
        int8_linear(torch.zeros(2, 6, dtype=torch.int8), one, zero, weight, torch.ones(3), sums)
    with pytest.raises(InputError, match=r"takes weight_scale of shape \(3,\), found \(2,\)"):
        int8_linear(torch.zeros(2, 4, dtype=torch.int8), one, zero, weight, torch.ones(2), sums)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_int8_linear_when_there_is_nothing_then_gives_nothing(shape):
    M, N = shape
    made = int8_linear(
        torch.zeros(M, 8, dtype=torch.int8),
        torch.ones(1),
        torch.zeros(1, dtype=torch.int32),
        torch.zeros(N, 8, dtype=torch.int8),
        torch.ones(N),
        torch.zeros(N, dtype=torch.int32),
    )
    assert made.shape == (M, N)
