import pytest

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.granularity import (
    PerBlock,
    PerChannel,
    PerGroup,
    PerTensor,
    PerToken,
    block_size_of,
    qparams_shape,
)


@pytest.mark.parametrize(
    ("granularity", "block", "scales"),
    [
        (PerTensor(), (4, 6, 8), (1, 1, 1)),
        (PerChannel(1), (4, 1, 8), (1, 6, 1)),
        (PerChannel(-1), (4, 6, 1), (1, 1, 8)),
        (PerGroup(2), (1, 1, 2), (4, 6, 4)),
        (PerGroup(3, axis=1), (1, 3, 1), (4, 2, 8)),
        (PerToken(), (1, 1, 8), (4, 6, 1)),
        (PerBlock((2, 3, 8)), (2, 3, 8), (2, 2, 1)),
    ],
)
def test_block_when_shape_is_known_then_scales_count_the_blocks(granularity, block, scales):
    assert block_size_of(granularity, (4, 6, 8)) == block
    assert qparams_shape(granularity, (4, 6, 8)) == scales


@pytest.mark.parametrize(
    "granularity", [PerChannel(3), PerGroup(5), PerBlock((2, 3)), PerBlock((3, 3, 8))]
)
def test_block_when_it_does_not_fit_then_refuses(granularity):
    with pytest.raises(ConfigError, match=r"out of range|does not divide"):
        block_size_of(granularity, (4, 6, 8))


def test_constructor_when_length_is_not_positive_then_refuses():
    with pytest.raises(ConfigError, match="group_size"):
        PerGroup(0)
    with pytest.raises(ConfigError, match="block_size"):
        PerBlock((2, 0))


def test_shape_when_axis_is_empty_then_no_blocks():
    assert qparams_shape(PerChannel(0), (0, 3)) == (0, 1)
