"""quantize_pixels in Triton's interpreter, and a stem that reads its words, to the definitions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.core.errors import InputError
from pt2e_quant.kernels.int8_conv2d.op import Int8Conv2d
from pt2e_quant.kernels.int8_conv2d.pack import fill_channels
from pt2e_quant.kernels.int8_conv2d.reference import int8_conv2d as conv_reference
from pt2e_quant.kernels.quantize.gpu import quantize_pixels
from pt2e_quant.kernels.quantize.op import QuantizePixels
from pt2e_quant.kernels.quantize.reference import quantize_pixels as reference
from pt2e_quant.kernels.tiles import TileConfig
from tests.kernels.int8_conv2d.convolutions import Drawn, made_of
from tests.kernels.operands import float_rows

SMALL = TileConfig((("BLOCK", 16),), num_warps=4, num_stages=1)


def assert_equal(made, wanted):
    assert made.dtype is wanted.dtype is torch.int8
    assert made.stride() == wanted.stride()
    assert torch.equal(made, wanted)


@settings(max_examples=40)
@given(
    st.data(),
    st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 6), st.integers(1, 9)),
    st.sampled_from([torch.contiguous_format, torch.channels_last]),
    st.sampled_from([(-128, -128), (127, -127), (3, -128)]),
)
def test_quantize_pixels_when_images_are_ragged_then_equals_the_definition(
    data, shape, layout, limits
):
    x = data.draw(float_rows(shape)).contiguous(memory_format=layout)
    zero_point, low = limits
    named = {"out_scale": 0.11, "out_zero_point": zero_point, "out_min": low}
    assert_equal(quantize_pixels(x, tiles=SMALL, **named), reference(x, **named))


def test_quantize_pixels_when_tiles_are_the_shipped_ones_then_any_strides_and_extreme_values_hold():
    generator = torch.Generator().manual_seed(0)
    for shape in ((2, 3, 33, 70), (1, 3, 300, 260)):
        x = torch.randn(shape, generator=generator)
        x[0, 1, 2, :2] = torch.tensor([3e36, -3e36])
        named = {"out_scale": 0.02, "out_zero_point": -14}
        assert_equal(QuantizePixels(x, **named), reference(x, **named))
        turned = x.transpose(2, 3)[:, :, ::2]
        assert_equal(QuantizePixels(turned, **named), reference(turned, **named))


@pytest.mark.parametrize("padding", [(0, 0), (3, 3)])
def test_stem_when_it_reads_words_then_gives_what_one_of_three_bytes_gives(padding):
    drawn = Drawn(2, 3, 20, (15, 13), (7, 7), (2, 2), padding, (1, 1), 1)
    _, *others = made_of(drawn, zero_point=-14)
    x = torch.randn(2, 3, 15, 13, generator=torch.Generator().manual_seed(0))
    words = QuantizePixels(x, out_scale=0.02, out_zero_point=-14)
    end = {"out_dtype": torch.int8, "out_scale": 0.4, "out_zero_point": 3, "activation": "relu"}
    wanted = conv_reference(words[:, :3], *others, **end)
    others[2] = fill_channels(others[2], 4)
    assert torch.equal(Int8Conv2d(words, *others, **end), wanted)


def test_quantize_pixels_when_given_what_it_cannot_read_then_refuses():
    with pytest.raises(InputError, match=r"takes x in .*, found torch.int8"):
        quantize_pixels(torch.zeros(1, 3, 2, 2, dtype=torch.int8))
    for shape in ((3, 2, 2), (1, 5, 2, 2)):
        with pytest.raises(InputError, match=r"takes x as \[N, 1 .. 4, H, W\]"):
            quantize_pixels(torch.zeros(shape))


def test_quantize_pixels_when_there_is_nothing_then_gives_nothing():
    assert quantize_pixels(torch.zeros(0, 3, 2, 2)).shape == (0, 4, 2, 2)
