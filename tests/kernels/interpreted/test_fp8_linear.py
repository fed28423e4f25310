"""fp8_linear in Triton's interpreter, held to its definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.core.errors import InputError
from pt2e_quant.kernels.fp8_linear.gpu import fp8_linear
from pt2e_quant.kernels.fp8_linear.op import Fp8Linear
from pt2e_quant.kernels.fp8_linear.reference import RUN, error_bound
from pt2e_quant.kernels.fp8_linear.reference import fp8_linear as reference
from pt2e_quant.kernels.tiles import TileConfig
from tests.kernels.fp8_operands import fp8_operands

IN_FLOAT32 = RUN * 2.0**-24


def small(splits):
    """The least tile, cut along K in at most so many parts."""
    blocks = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 32, "GROUP_M": 2, "SPLIT_K": splits}
    return TileConfig(tuple(blocks.items()), num_warps=4, num_stages=2)


@settings(max_examples=20)
@given(
    st.data(), st.integers(1, 20), st.integers(1, 20), st.integers(1, 500), st.sampled_from([1, 3])
)
def test_fp8_linear_when_shapes_are_ragged_then_is_within_the_bound(data, M, N, K, splits):
    operands = data.draw(fp8_operands(M, N, K))
    end = {
        "bias": torch.linspace(-1, 1, N),
        "residual": torch.ones(M, N),
        "activation": data.draw(st.sampled_from(["none", "relu"])),
    }
    made = fp8_linear(*operands, tiles=small(splits), **end)
    wanted = reference(*operands, **end)
    bound = error_bound(*operands, splits=splits, run_error=IN_FLOAT32)
    # relu enlarges no error; the sums with bias and residual round twice.
    assert ((made - wanted).double().abs() <= bound + 2**-22 * (wanted.abs() + 2)).all()
    assert torch.equal(made, fp8_linear(*operands, tiles=small(splits), **end))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
def test_fp8_linear_when_tiles_are_the_shipped_ones_then_every_result_dtype_holds(dtype):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(70, 256, generator=generator).to(torch.float8_e4m3fn)
    for M in (1, 33):
        x = torch.randn(M, 256, generator=generator).to(torch.float8_e4m3fn)
        operands = (x, torch.full((M,), 0.1), weight, torch.full((70,), 0.1))
        end = {"out_dtype": dtype, "out_scale": 0.05}
        made, wanted = Fp8Linear(*operands, **end), reference(*operands, **end)
        if dtype is torch.int8:  # a sum near the middle of two steps may go to either
            assert (made.int() - wanted.int()).abs().max() <= 1
        else:
            torch.testing.assert_close(made, wanted, rtol=2**-10, atol=1e-5)


def test_fp8_linear_when_dtypes_are_others_then_refuses():
    one, weight = torch.ones(1), torch.zeros(3, 4).to(torch.float8_e5m2)
    with pytest.raises(InputError, match=r"takes weight in torch.float8_e4m3fn"):
        fp8_linear(torch.zeros(2, 4).to(torch.float8_e4m3fn), one, weight, one)


def test_fp8_linear_when_shapes_are_others_then_refuses():
    x, weight = (torch.zeros(rows, 4).to(torch.float8_e4m3fn) for rows in (2, 3))
    one = torch.ones(1)
    with pytest.raises(InputError, match=r"takes x of shape \(1, 4\), found \(1, 8\)"):
        fp8_linear(x.reshape(1, 8), one, weight, one)
    with pytest.raises(InputError, match="takes weight_scale of 1 element or 3"):
        fp8_linear(x, one, weight, torch.ones(2))


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_fp8_linear_when_there_is_nothing_then_gives_nothing(shape):
    M, N = shape
    x, weight = (torch.zeros(rows, 8).to(torch.float8_e4m3fn) for rows in shape)
    assert fp8_linear(x, torch.ones(1), weight, torch.ones(1)).shape == (M, N)
