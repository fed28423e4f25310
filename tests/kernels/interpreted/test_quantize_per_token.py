"""quantize_per_token in Triton's interpreter, held to its definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.core.errors import InputError
from pt2e_quant.kernels.quantize_per_token.gpu import quantize_per_token
from pt2e_quant.kernels.quantize_per_token.op import QuantizeRows
from pt2e_quant.kernels.quantize_per_token.reference import quantize_per_token as reference
from pt2e_quant.kernels.tiles import TileConfig
from tests.kernels.operands import float_rows

SMALL = TileConfig((("BLOCK_M", 4), ("BLOCK_K", 16)), num_warps=4, num_stages=1)


def assert_equal(made, wanted):
    for ours, theirs in zip(made, wanted, strict=True):
        assert ours.dtype is theirs.dtype
        assert ours.shape == theirs.shape
        assert torch.equal(ours, theirs)


@settings(max_examples=60)
@given(st.data(), st.integers(1, 9), st.integers(1, 50), st.sampled_from([-128, -127, -8]))
def test_quantize_per_token_when_shapes_are_ragged_then_equals_the_definition(
    data, M, K, quant_min
):
    x = data.draw(float_rows((M, K)))
    assert_equal(quantize_per_token(x, quant_min, tiles=SMALL), reference(x, quant_min))


def test_quantize_per_token_when_tiles_are_the_shipped_ones_then_equals_the_definition():
    generator = torch.Generator().manual_seed(0)
    for K in (65, 768, 1025, 8200):
        x = torch.randn(2, 3, K, generator=generator)
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            assert_equal(QuantizeRows(x.to(dtype)), reference(x.to(dtype)))


def test_quantize_per_token_when_rows_have_any_stride_then_takes_them():
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).t()
    assert_equal(quantize_per_token(x, tiles=SMALL), reference(x))


def test_quantize_per_token_when_dtypes_are_others_or_rows_empty_then_refuses():
    with pytest.raises(InputError, match=r"takes x in torch.float32 or .*, found torch.int8"):
        quantize_per_token(torch.zeros(2, 3, dtype=torch.int8))
    with pytest.raises(InputError, match="at least one element"):
        quantize_per_token(torch.zeros(2, 0))


def test_quantize_per_token_when_there_are_no_rows_then_gives_nothing():
    integers, scale, zero_point = quantize_per_token(torch.zeros(0, 4))
    assert (integers.shape, scale.shape, zero_point.shape) == ((0, 4), (0, 1), (0, 1))
