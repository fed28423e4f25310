"""int8_conv2d's definition, held to Python's integers; its packing; its operator."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.core.errors import InputError
from pt2e_quant.kernels.int8_conv2d.op import Int8Conv2d, cost
from pt2e_quant.kernels.int8_conv2d.pack import pack_weight, unpack_weight, window_sums
from pt2e_quant.kernels.int8_conv2d.reference import int8_conv2d
from pt2e_quant.kernels.int8_conv2d.window import conv_sizes
from tests.kernels.int8_conv2d.convolutions import Drawn, conv_operands, convolutions, made_of
from tests.kernels.operands import integers


def by_hand(drawn, operands, out_scale):
    """Sums in Python's integers; each float step rounded by numpy to float32."""
    x, zero_point = operands[0].tolist(), operands[2].item()
    weight, scale = unpack_weight(operands[3]).tolist(), operands[4].tolist()
    sizes = conv_sizes(operands[0].shape, operands[3].shape, *drawn.window)
    taps = [(i, j) for i in range(drawn.kernel[0]) for j in range(drawn.kernel[1])]
    made = torch.empty((drawn.batch, drawn.outputs, *sizes.out), dtype=torch.int8)
    for place in np.ndindex(*made.shape):
        n, o, row, column = place
        first = o // sizes.columns * sizes.depth
        total = 0
        for i, j in taps:
            h = row * drawn.stride[0] - drawn.padding[0] + i * drawn.dilation[0]
            w = column * drawn.stride[1] - drawn.padding[1] + j * drawn.dilation[1]
            if 0 <= h < drawn.image[0] and 0 <= w < drawn.image[1]:
                total += sum(
                    (x[n][first + c][h][w] - zero_point) * weight[o][c][i][j]
                    for c in range(sizes.depth)
                )
        factor = np.float32(operands[1].item()) * np.float32(scale[o])
        step = np.rint(np.float32(total) * factor * np.float32(1.0 / out_scale))
        made[place] = int(np.clip(step - 3, -128, 127))
    return made


@settings(max_examples=40)
@given(st.data(), convolutions(most_channels=8), st.sampled_from([0.002, 0.7, 40.0]))
def test_int8_conv2d_when_inputs_are_drawn_then_equals_pythons_integers(data, drawn, out_scale):
    operands = data.draw(conv_operands(drawn))
    made = int8_conv2d(*operands, out_dtype=torch.int8, out_scale=out_scale, out_zero_point=-3)
    assert torch.equal(made, by_hand(drawn, operands, out_scale))
    assert made.is_contiguous(memory_format=torch.channels_last)


@settings(max_examples=40)
@given(st.data(), convolutions())
def test_pack_weight_when_unpacked_then_nothing_is_lost(data, drawn):
    weight = data.draw(integers(drawn.weight_shape))
    packed = pack_weight(weight, drawn.groups)
    assert packed.numel() == weight.numel()
    assert torch.equal(unpack_weight(packed), weight)


@settings(max_examples=40)
@given(st.data(), convolutions())
def test_window_sums_when_a_part_of_the_window_is_read_then_its_corners_give_the_sum(data, drawn):
    weight = data.draw(integers(drawn.weight_shape))
    (top, bottom), (left, right) = (
        sorted(data.draw(st.lists(st.integers(0, size), min_size=2, max_size=2)))
        for size in drawn.kernel
    )
    table = window_sums(weight)
    found = table[bottom, right] - table[top, right] - table[bottom, left] + table[top, left]
    part = weight[:, :, top:bottom, left:right]
    assert torch.equal(found, part.sum((1, 2, 3), dtype=torch.int32))


DENSE = Drawn(2, 6, 5, (6, 5), (3, 2), (2, 1), (1, 1), (1, 2), 1)
DEPTHWISE = Drawn(1, 4, 8, (5, 5), (3, 3), (1, 1), (1, 1), (1, 1), 4)


@pytest.mark.parametrize("drawn", [DENSE, DEPTHWISE])
def test_operator_when_checked_by_torch_then_is_whole(drawn):
    operands = made_of(drawn, zero_point=4)
    named = {"bias": torch.ones(drawn.outputs), "out_dtype": torch.float16}
    torch.library.opcheck(Int8Conv2d, operands, named)


def test_operator_when_sizes_are_dynamic_then_shapes_follow_and_strides_are_channels_last():
    operands = made_of(DENSE, zero_point=4)

    class Model(torch.nn.Module):
        def forward(self, x):
            return Int8Conv2d(x, *operands[1:], out_dtype=torch.int8)

    sizes = {0: torch.export.Dim.DYNAMIC, 2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC}
    ep = torch.export.export(Model(), (operands[0],), dynamic_shapes=(sizes,))
    (call,) = [n for n in ep.graph.nodes if n.target is Int8Conv2d]
    value = call.meta["val"]
    assert value.dtype is torch.int8
    assert value.stride()[1] == 1
    larger = torch.zeros(3, 6, 9, 8, dtype=torch.int8)
    assert ep.module()(larger).shape == (3, 5, 5, 8)


def test_cost_when_counted_then_has_each_tensor_once():
    found = cost(
        torch.zeros(1, 3, 4, 4, dtype=torch.int8),
        torch.zeros(5, 2, 2, 3, dtype=torch.int8),
        torch.zeros(1, 5, 3, 3, dtype=torch.int8),
    )
    assert (found.bytes, found.operations) == (48 + 60 + 45 + 40, 2 * 45 * 12)


@pytest.mark.parametrize(
    ("drawn", "name"),
    [
        (Drawn(64, 3, 64, (224, 224), (7, 7), (2, 2), (3, 3), (1, 1), 1), "stem_large_narrow"),
        (Drawn(64, 24, 144, (56, 56), (1, 1), (1, 1), (0, 0), (1, 1), 1), "folded_large_wide"),
        (Drawn(1, 256, 256, (14, 14), (3, 3), (1, 1), (1, 1), (1, 1), 1), "dense_small_wide"),
        (Drawn(64, 64, 256, (56, 56), (1, 1), (1, 1), (0, 0), (1, 1), 1), "pointwise_large_wide"),
        (Drawn(64, 96, 96, (56, 56), (3, 3), (1, 1), (1, 1), (1, 1), 96), "depthwise"),
    ],
)
def test_conv_sizes_when_given_a_shape_then_names_its_class(drawn, name):
    packed = pack_weight(torch.zeros(drawn.weight_shape, dtype=torch.int8), drawn.groups)
    shape = (drawn.batch, drawn.channels, *drawn.image)
    assert conv_sizes(shape, packed.shape, *drawn.window).shape_class == name


def test_conv_sizes_when_sizes_do_not_go_together_then_refuses():
    with pytest.raises(InputError, match="x has 7 channels, the weight 1 groups of 6"):
        conv_sizes((1, 7, 5, 5), (5, 3, 3, 6), (1, 1), (0, 0), (1, 1), 1)
