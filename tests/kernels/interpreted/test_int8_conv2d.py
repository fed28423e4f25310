"""int8_conv2d in Triton's interpreter, held to its definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.core.errors import InputError
from pt2e_quant.kernels.int8_conv2d.gpu import int8_conv2d
from pt2e_quant.kernels.int8_conv2d.op import Int8Conv2d
from pt2e_quant.kernels.int8_conv2d.reference import int8_conv2d as reference
from pt2e_quant.kernels.int8_conv2d.window import conv_sizes
from pt2e_quant.kernels.tiles import TileConfig, read_tiles
from tests.kernels.int8_conv2d.convolutions import Drawn, conv_operands, convolutions, made_of
from tests.kernels.operands import epilogues

PRODUCT = TileConfig((("BLOCK_M", 16), ("BLOCK_N", 16), ("BLOCK_K", 32)), 4, 2)
DEPTHWISE = TileConfig((("BLOCK_M", 8), ("BLOCK_N", 16)), 4, 1)
# Nothing but exp and erf is rounded otherwise than in the definition.
EXACT = {"none", "relu", "clamp", "leaky_relu", "hardswish"}


def sizes_of(operands):
    return conv_sizes(operands[0].shape, operands[3].shape, *operands[6:])


def assert_equal(made, wanted, activation):
    assert made.dtype is wanted.dtype
    assert made.shape == wanted.shape
    assert made.is_contiguous(memory_format=torch.channels_last)
    if made.dtype is torch.int8:
        bound_lsb = 0 if activation in EXACT else 1
        assert (made.int() - wanted.int()).abs().max() <= bound_lsb
    elif made.dtype is torch.bfloat16:  # the interpreter truncates to bfloat16
        torch.testing.assert_close(made, wanted, rtol=2**-7, atol=1e-6)
    else:
        rtol = 2**-10 if made.dtype is torch.float16 else 2e-6
        torch.testing.assert_close(made, wanted, rtol=rtol, atol=2e-6)


@settings(max_examples=25)
@given(st.data(), convolutions())
def test_int8_conv2d_when_windows_are_ragged_then_equals_the_definition(data, drawn):
    operands = data.draw(conv_operands(drawn))
    sizes = sizes_of(operands)
    shape = (sizes.batch, sizes.outputs, *sizes.out)
    epilogue = data.draw(epilogues(shape, channel_axis=1))
    tiles = DEPTHWISE if sizes.is_depthwise else PRODUCT
    made = int8_conv2d(*operands, tiles=tiles, **epilogue)
    assert_equal(made, reference(*operands, **epilogue), epilogue["activation"])


FORMS = {
    "stem": Drawn(1, 3, 70, (15, 13), (7, 7), (2, 2), (3, 3), (1, 1), 1),
    "dense": Drawn(2, 66, 20, (5, 4), (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "dilated": Drawn(1, 80, 20, (7, 6), (3, 2), (2, 1), (4, 2), (3, 2), 1),
    "groups": Drawn(1, 128, 6, (4, 5), (3, 3), (1, 2), (1, 0), (1, 1), 2),
    "pointwise": Drawn(2, 72, 70, (5, 5), (1, 1), (1, 1), (0, 0), (1, 1), 1),
    "strided pointwise": Drawn(1, 64, 20, (5, 7), (1, 1), (2, 2), (0, 0), (1, 1), 1),
    "depthwise": Drawn(2, 37, 37, (6, 5), (3, 3), (2, 1), (1, 1), (1, 1), 37),
    "multiplied": Drawn(1, 9, 27, (5, 5), (5, 3), (1, 1), (2, 3), (1, 2), 9),
    "row": Drawn(2, 70, 9, (1, 11), (1, 3), (1, 2), (0, 2), (1, 1), 1),
    "all border": Drawn(1, 64, 5, (2, 1), (3, 3), (1, 1), (3, 4), (1, 1), 1),
}


@pytest.mark.parametrize("form", FORMS)
def test_int8_conv2d_when_tiles_are_the_shipped_ones_then_equals_the_definition(form):
    operands = made_of(FORMS[form], zero_point=-128)
    assert sizes_of(operands).shape_class in read_tiles("int8_conv2d")
    end = {"out_dtype": torch.int8, "out_scale": 0.4, "out_zero_point": 3, "activation": "relu"}
    made, wanted = Int8Conv2d(*operands, **end), reference(*operands, **end)
    assert made.stride() == wanted.stride()
    assert torch.equal(made, wanted)


def test_int8_conv2d_when_images_are_in_another_layout_then_reads_them():
    operands = made_of(FORMS["dense"], zero_point=5)
    packed = (operands[0].contiguous(), *operands[1:])
    assert torch.equal(int8_conv2d(*packed, tiles=PRODUCT), reference(*operands))


def test_int8_conv2d_when_there_is_nothing_then_gives_nothing():
    operands = made_of(Drawn(0, 3, 4, (5, 5), (3, 3), (1, 1), (0, 0), (1, 1), 1), zero_point=0)
    assert int8_conv2d(*operands).shape == (0, 4, 3, 3)


def test_int8_conv2d_when_operands_do_not_go_together_then_refuses():
    operands = made_of(FORMS["dense"], zero_point=0)
    with pytest.raises(InputError, match=r"takes x in torch.int8, found torch.float32"):
        int8_conv2d(operands[0].float(), *operands[1:])
    with pytest.raises(InputError, match="x has 65 channels, the weight 1 groups of 66"):
        int8_conv2d(operands[0][:, :65], *operands[1:])
    with pytest.raises(InputError, match=r"takes x as \[N, C, H, W\]"):
        int8_conv2d(operands[0][0], *operands[1:])
    with pytest.raises(
        InputError, match=r"takes residual of shape .2, 5, 4, 20., found .2, 5, 4, 1."
    ):
        int8_conv2d(*operands, residual=torch.zeros(2, 1, 5, 4))
