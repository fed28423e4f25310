import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.tensors.layouts.gpu_weights import swizzle, unswizzle


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 300), groups=st.integers(1, 11))
def test_scales_when_swizzled_then_lie_where_the_definition_says_and_come_back(rows, groups):
    scale = torch.randint(0, 256, (rows, groups), dtype=torch.uint8)
    tiles = swizzle(scale)
    assert torch.equal(unswizzle(tiles, rows, groups, torch.uint8), scale)
    flat = tiles.reshape(tiles.shape[0], tiles.shape[1], 512)
    r, c = rows - 1, groups - 1
    place = 16 * (r % 32) + 4 * ((r % 128) // 32) + c % 4
    assert flat[r // 128, c // 4, place] == scale[r, c]
