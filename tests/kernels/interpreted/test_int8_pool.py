"""int8_pool in Triton's interpreter, held to its definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.core.errors import ConfigError, InputError
from pt2e_quant.kernels.int8_pool.gpu import int8_pool
from pt2e_quant.kernels.int8_pool.op import Int8Pool
from pt2e_quant.kernels.int8_pool.reference import int8_pool as reference
from pt2e_quant.kernels.tiles import TileConfig
from tests.kernels.int8_pool.pools import pools
from tests.kernels.operands import integers

SMALL = TileConfig((("BLOCK_P", 8), ("BLOCK_C", 16)), num_warps=4, num_stages=1)


@settings(max_examples=50)
@given(st.data(), st.integers(1, 2), st.integers(1, 20))
def test_int8_pool_when_inputs_are_drawn_then_equals_the_definition(data, N, C):
    H, W, arguments = data.draw(pools())
    x = data.draw(integers((N, C, H, W)))
    if data.draw(st.booleans()):
        x = x.to(memory_format=torch.channels_last)
    named = {
        "x_scale": 0.03,
        "x_zero_point": data.draw(st.integers(-128, 127)),
        "out_dtype": data.draw(st.sampled_from([torch.int8, torch.float32])),
        "out_scale": 0.03,
        "out_zero_point": data.draw(st.integers(-128, 127)),
        "activation": data.draw(st.sampled_from(["none", "relu"])),
    }
    made = int8_pool(x, *arguments, **named, tiles=SMALL)
    wanted = reference(x, *arguments, **named)
    assert made.stride() == wanted.stride()
    assert torch.equal(made, wanted)


def test_int8_pool_when_tiles_are_the_shipped_ones_then_equals_the_definition():
    x = torch.randint(-128, 128, (3, 300, 7, 7), dtype=torch.int8)
    named = {"x_scale": 0.1, "out_dtype": torch.int8, "out_scale": 0.02}
    for arguments in (
        ("adaptive", [0, 0], [0, 0], [0, 0], [1, 1]),
        ("max", [3, 3], [2, 2], [1, 1], [4, 4]),
    ):
        assert torch.equal(Int8Pool(x, *arguments, **named), reference(x, *arguments, **named))


def test_int8_pool_when_given_no_image_or_no_known_kind_then_refuses():
    with pytest.raises(InputError, match="takes N, C, H, W images"):
        int8_pool(torch.zeros(3, 4, dtype=torch.int8), "max", [1], [1], [0], [1, 1])
    with pytest.raises(ConfigError, match='max, average, adaptive, found "min"'):
        int8_pool(torch.zeros(1, 1, 2, 2, dtype=torch.int8), "min", [1], [1], [0], [1, 1])


def test_int8_pool_when_there_is_nothing_then_gives_nothing():
    x = torch.zeros(0, 4, 6, 6, dtype=torch.int8)
    made = int8_pool(x, "adaptive", [0, 0], [0, 0], [0, 0], [1, 1])
    assert made.shape == (0, 4, 1, 1)
