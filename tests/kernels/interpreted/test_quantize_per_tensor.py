"""quantize_per_tensor in Triton's interpreter, held to its definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.core.errors import InputError
from pt2e_quant.kernels.quantize_per_tensor import reference
from pt2e_quant.kernels.quantize_per_tensor.gpu import (
    quantize_per_tensor,
    quantize_per_tensor_e4m3,
)
from pt2e_quant.kernels.quantize_per_tensor.op import QuantizeTensor, QuantizeTensorE4m3
from pt2e_quant.kernels.tiles import TileConfig
from tests.kernels.e4m3_values import hard_values, same_codes
from tests.kernels.operands import FLOATS, float_rows

SMALL = TileConfig((("BLOCK", 16), ("PARTIALS", 4)), num_warps=4, num_stages=1)
RANGES = st.sampled_from([(-128, 127), (-127, 127), (-8, 7), (0, 127)])
extreme = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")


def assert_equal(made, wanted):
    for ours, theirs in zip(made, wanted, strict=True):
        assert ours.dtype is theirs.dtype
        assert ours.shape == theirs.shape
        assert ours.stride() == theirs.stride()
        assert torch.equal(ours, theirs)


def assert_equal_codes(made, wanted):
    assert same_codes(made[0], wanted[0])
    torch.testing.assert_close(made[1], wanted[1], rtol=0, atol=0, equal_nan=True)


@settings(max_examples=60)
@given(st.data(), st.integers(1, 9), st.integers(1, 20), RANGES, st.booleans())
def test_quantize_per_tensor_when_shapes_are_ragged_then_equals_the_definition(
    data, M, K, limits, symmetric
):
    # One program, several, and several with up to three blocks each.
    x = data.draw(float_rows((M, K)))
    eps = data.draw(st.sampled_from([2.0**-23, 1e-12, 0.5]))
    asked = (*limits, eps, symmetric)
    assert_equal(
        quantize_per_tensor(x, *asked, tiles=SMALL), reference.quantize_per_tensor(x, *asked)
    )


@settings(max_examples=30)
@given(st.data(), st.integers(1, 9), st.integers(1, 20))
def test_codes_when_shapes_are_ragged_then_equal_the_definition(data, M, K):
    x = data.draw(float_rows((M, K)))
    wanted = reference.quantize_per_tensor_e4m3(x)
    assert_equal_codes(quantize_per_tensor_e4m3(x, tiles=SMALL), wanted)


@extreme
@pytest.mark.parametrize("elements", [10, 100])
@pytest.mark.parametrize("at", [0, -1])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 3e38, 2.0**-149])
def test_codes_when_values_are_extreme_then_equal_the_definition(elements, at, value):
    x = torch.linspace(-1.0, 1.0, elements)
    x[at] = value
    wanted = reference.quantize_per_tensor_e4m3(x)
    assert_equal_codes(quantize_per_tensor_e4m3(x, tiles=SMALL), wanted)


def test_codes_when_values_are_hard_to_round_then_are_right_to_the_last_bit():
    x = hard_values()
    x = x[x.abs() <= 448]
    assert_equal_codes(
        quantize_per_tensor_e4m3(x, tiles=SMALL), reference.quantize_per_tensor_e4m3(x)
    )


def test_quantize_per_tensor_when_tiles_are_the_shipped_ones_then_equals_the_definition():
    generator = torch.Generator().manual_seed(0)
    for size, dtype in zip((8192, 8193, 2**18 + 5), FLOATS, strict=True):
        x = torch.randn(size, generator=generator).to(dtype)
        assert_equal(QuantizeTensor(x), reference.quantize_per_tensor(x))
        assert_equal_codes(QuantizeTensorE4m3(x), reference.quantize_per_tensor_e4m3(x))


@extreme
def test_quantize_per_tensor_when_a_range_is_beyond_float16_then_its_scale_is_infinite():
    x = torch.tensor([-6e4, 1.0, 6e4], dtype=torch.float16)
    made = quantize_per_tensor(x, tiles=SMALL)
    assert_equal(made, reference.quantize_per_tensor(x))
    assert made[1].isinf()


def test_quantize_per_tensor_when_strides_are_dense_then_keeps_them_and_copies_others():
    x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    for laid in (x.to(memory_format=torch.channels_last), x[:, :, ::2], x.transpose(0, 1)):
        assert_equal(quantize_per_tensor(laid, tiles=SMALL), reference.quantize_per_tensor(laid))
        made = quantize_per_tensor_e4m3(laid, tiles=SMALL)
        wanted = reference.quantize_per_tensor_e4m3(laid)
        assert_equal_codes(made, wanted)
        assert made[0].stride() == wanted[0].stride()


def test_quantize_per_tensor_when_there_are_no_elements_then_has_the_qparams_of_zeros():
    x = torch.zeros(0, 4)
    for found in (quantize_per_tensor(x, tiles=SMALL), reference.quantize_per_tensor(x)):
        assert found[0].shape == (0, 4)
        assert (found[1].item(), found[2].item()) == (2.0**-23, -128)
    assert_equal_codes(
        quantize_per_tensor_e4m3(x, tiles=SMALL), reference.quantize_per_tensor_e4m3(x)
    )


def test_quantize_per_tensor_when_dtypes_or_ranges_are_others_then_refuses():
    for launch in (quantize_per_tensor, quantize_per_tensor_e4m3):
        with pytest.raises(InputError, match=r"takes x in torch.float32 or .*, found torch.int8"):
            launch(torch.zeros(2, 3, dtype=torch.int8))
    with pytest.raises(InputError, match=r"takes a range of int8 .*, found 0 .. 255 and"):
        quantize_per_tensor(torch.zeros(3), 0, 255)
    with pytest.raises(InputError, match="an eps above 0"):
        quantize_per_tensor(torch.zeros(3), eps=0.0)
