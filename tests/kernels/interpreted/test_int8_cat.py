"""int8_cat in Triton's interpreter, held to its definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.core.errors import ConfigError, InputError
from pt2e_quant.kernels.int8_cat.gpu import int8_cat
from pt2e_quant.kernels.int8_cat.op import Int8Cat
from pt2e_quant.kernels.int8_cat.reference import int8_cat as reference
from pt2e_quant.kernels.tiles import TileConfig
from tests.kernels.operands import integers

SMALL = TileConfig((("BLOCK_M", 4), ("BLOCK_K", 16)), num_warps=4, num_stages=1)


@settings(max_examples=20)
@given(st.data(), st.integers(1, 6), st.sampled_from([0, 1, 2, -1]), st.booleans())
def test_int8_cat_when_inputs_are_drawn_then_equals_the_definition(
    data, count, dim, is_channels_last
):
    xs = []
    for _ in range(count):
        shape = [2, 3, 4, 5]
        shape[dim] = data.draw(st.integers(1, 7))
        x = data.draw(integers(tuple(shape)))
        xs.append(x.to(memory_format=torch.channels_last) if is_channels_last else x)
    scales = data.draw(st.lists(st.sampled_from([0.01, 0.3]), min_size=count, max_size=count))
    zeros = data.draw(st.lists(st.integers(-128, 127), min_size=count, max_size=count))
    named = {
        "out_dtype": data.draw(st.sampled_from([torch.int8, torch.float32])),
        "out_scale": 0.1,
        "out_zero_point": data.draw(st.integers(-128, 127)),
        "activation": data.draw(st.sampled_from(["none", "relu"])),
    }
    made = int8_cat(xs, dim, scales, zeros, **named, tiles=SMALL)
    wanted = reference(xs, dim, scales, zeros, **named)
    assert made.stride() == wanted.stride()
    assert torch.equal(made, wanted)


def test_int8_cat_when_tiles_are_the_shipped_ones_then_equals_the_definition():
    xs = [torch.randint(-128, 128, (2, n, 3, 3), dtype=torch.int8) for n in (64, 200, 1)]
    for last in (False, True):
        parts = [x.to(memory_format=torch.channels_last) if last else x for x in xs]
        named = {"out_dtype": torch.int8, "out_scale": 0.1}
        arguments = (parts, 1, [0.1, 0.2, 0.3], [0, -7, 5])
        assert torch.equal(Int8Cat(*arguments, **named), reference(*arguments, **named))


def test_int8_cat_when_given_what_it_cannot_join_then_refuses():
    x = torch.zeros(2, 3, dtype=torch.int8)
    with pytest.raises(ConfigError, match="found 2 tensors, 1 scales and 2 zero points"):
        int8_cat([x, x], 0, [1.0], [0, 0])
    with pytest.raises(InputError, match=r"takes xs\[1\] in torch.int8, found torch.float32"):
        int8_cat([x, x.float()], 0, [1.0, 1.0], [0, 0])


def test_int8_cat_when_there_is_nothing_then_gives_nothing():
    x = torch.zeros(0, 3, dtype=torch.int8)
    assert int8_cat([x, x], 1, [1.0, 1.0], [0, 0]).shape == (0, 6)
