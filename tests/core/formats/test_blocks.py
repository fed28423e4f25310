import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.formats.blocks import (
    WHOLE,
    block_lengths,
    check_blocks,
    from_rows,
    grid_shape,
    spread,
    to_rows,
)
from pt2e_quant.core.granularity import (
    PerBlock,
    PerChannel,
    PerGroup,
    PerRow,
    PerTensor,
    PerToken,
    block_size_of,
)

SHAPES = st.lists(st.integers(1, 7), min_size=1, max_size=4)


@st.composite
def shape_and_block(draw):
    shape = draw(SHAPES)
    block = [draw(st.sampled_from([WHOLE, 1, 2, 3, size])) for size in shape]
    return shape, block


@given(shape_and_block())
def test_rows_when_made_then_one_a_block_and_back(case):
    shape, block = case
    x = torch.randn(shape)
    rows = to_rows(x, block)
    grid = grid_shape(shape, block)
    assert rows.shape[0] == torch.empty(grid).numel()
    assert torch.equal(from_rows(rows, shape, block), x)


@given(shape_and_block())
def test_spread_when_scales_are_numbered_then_each_element_has_its_blocks(case):
    shape, block = case
    grid = grid_shape(shape, block)
    numbers = torch.arange(torch.empty(grid).numel(), dtype=torch.float32).reshape(grid) + 1
    wide = spread(numbers, shape, block).expand(shape)
    rows = to_rows(wide.contiguous(), block)  # filled up with zeros, which are no numbers
    for number, row in zip(numbers.flatten(), rows, strict=True):
        assert set(row[row != 0].tolist()) <= {number.item()}


@pytest.mark.parametrize(
    "granularity",
    [PerTensor(), PerChannel(1), PerGroup(4), PerGroup(2, axis=0), PerRow(-2), PerToken()],
)
def test_lengths_when_of_a_granularity_then_the_same_blocks(granularity):
    shape = (4, 6, 8)
    lengths = block_lengths(granularity, 3)
    filled = tuple(s if n == WHOLE else n for s, n in zip(shape, lengths, strict=True))
    assert filled == block_size_of(granularity, shape)


def test_lengths_when_block_has_fewer_axes_then_ones_in_front():
    assert block_lengths(PerBlock((1, 128)), 3) == (1, 1, 128)


@pytest.mark.parametrize("granularity", [PerChannel(2), PerGroup(4, axis=-3), PerBlock((1, 1, 1))])
def test_lengths_when_out_of_range_then_refused(granularity):
    with pytest.raises(ConfigError):
        block_lengths(granularity, 2)


@pytest.mark.parametrize("block", [(1,), (1, 0), (1, -2)])
def test_blocks_when_they_are_none_then_refused(block):
    with pytest.raises(ConfigError, match="a length for each of 2 axes"):
        check_blocks(block, 2)


def test_spread_when_compiled_and_the_last_block_is_shorter_then_every_element_has_its_scale():
    scale = torch.rand(3, 3, generator=torch.Generator().manual_seed(0)) + 1

    def of_elements(scale):
        return spread(scale, (3, 300), (1, 128)) * 2

    assert torch.equal(torch.compile(of_elements, fullgraph=True)(scale), of_elements(scale))
