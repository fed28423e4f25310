"""The values that quantized tensors can have."""

import pytest
import torch

from pt2e_quant.core.qparams import QParams
from pt2e_quant.passes.algorithms.grid import Declined, grid_of

WEIGHT = torch.tensor([[0.2, -1.0, 0.5, 0.9], [4.0, -3.0, 0.1, 2.0]])


def qparams(scale, zero_point, zero_dtype=torch.int32, **more) -> QParams:
    return QParams(
        scale=torch.tensor(scale),
        zero_point=torch.tensor(zero_point, dtype=zero_dtype),
        quant_min=-2,
        quant_max=1,
        dtype=torch.int8,
        **more,
    )


def test_nearest_when_per_channel_then_multiples_of_each_scale_within_the_range():
    grid = grid_of(qparams([0.5, 2.0], [0, -1], axis=0), WEIGHT)
    expected = torch.tensor([[0.0, -1.0, 0.5, 0.5], [4.0, -2.0, 0.0, 2.0]])
    assert torch.equal(grid.nearest(WEIGHT), expected)
    assert torch.equal(grid[1].nearest(WEIGHT[1]), expected[1])


def test_nearest_when_grouped_then_each_group_by_its_own_scale():
    grid = grid_of(qparams([[0.5, 0.25], [2.0, 1.0]], [[0, 0], [0, 0]], group_size=2), WEIGHT)
    expected = torch.tensor([[0.0, -1.0, 0.25, 0.25], [2.0, -4.0, 0.0, 1.0]])
    assert torch.equal(grid.nearest(WEIGHT), expected)


def test_grid_when_zero_points_are_floats_then_declined():
    with pytest.raises(Declined, match="zero_points are no integers"):
        grid_of(qparams([0.5, 2.0], [0.5, 0.0], torch.float32, axis=0), WEIGHT)
