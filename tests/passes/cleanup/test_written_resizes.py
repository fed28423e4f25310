"""Upsampling by repeated pixels is found as people write it, and nothing else is taken for it."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.export import Dim

from pt2e_quant.passes.cleanup.written_resizes import name_resizes
from tests.call_function import Call

X = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
WRITTEN = {
    "axes": lambda x: x[:, :, :, None, :, None].expand(-1, -1, -1, 2, -1, 3).reshape(2, 3, 8, 15),
    "view": lambda x: (
        x.view(2, 3, 4, 1, 5, 1).expand(2, 3, 4, 2, 5, 3).contiguous().view(2, 3, 8, 15)
    ),
    "reshape": lambda x: x.reshape(2, 3, 4, 1, 5, 1).expand(2, 3, 4, 2, 5, 3).reshape(2, 3, 8, 15),
    "repeats": lambda x: x.repeat_interleave(2, 2).repeat_interleave(3, 3),
    "repeats_from_the_end": lambda x: x.repeat_interleave(3, -1).repeat_interleave(2, dim=-2),
}
OTHERS = {
    "tiles": lambda x: x[:, :, None, :, None].expand(2, 3, 2, 4, 3, 5).reshape(2, 3, 8, 15),
    "channels": lambda x: x[:, :, None].expand(2, 3, 2, 4, 5).reshape(2, 6, 4, 5),
    "one_axis": lambda x: x.repeat_interleave(2, 2).relu().repeat_interleave(3, 3),
    "channels_and_rows": lambda x: x.repeat_interleave(2, 1).repeat_interleave(3, 2),
    "other_order": lambda x: (
        x.transpose(2, 3)[:, :, :, None, :, None].expand(2, 3, 5, 3, 4, 2).reshape(2, 3, 8, 15)
    ),
    "rows_of_batches": lambda x: x.flatten(0, 1).repeat_interleave(2, 1).repeat_interleave(2, 2),
}


def captured(function, **options):
    return torch.export.export(Call(function), (X,), **options).module(check_guards=False)


def names(gm):
    return {str(n.target) for n in gm.graph.nodes if n.op == "call_function"}


@pytest.mark.parametrize("name", WRITTEN)
def test_upsampling_when_written_out_then_the_operator(name):
    gm = captured(WRITTEN[name])
    expected = gm(X)
    assert name_resizes(gm).changed
    assert names(gm) == {"aten.upsample_nearest2d.vec"}
    torch.testing.assert_close(gm(X), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", OTHERS)
def test_view_when_it_is_no_upsampling_then_it_stays(name):
    gm = captured(OTHERS[name])
    expected = gm(X)
    assert not name_resizes(gm).changed
    torch.testing.assert_close(gm(X), expected, rtol=0, atol=0)


@given(st.integers(1, 3), st.integers(1, 3))
def test_upsampling_when_by_any_factors_then_equal(rows, columns):
    def forward(x):
        blocks = x[:, :, :, None, :, None].expand(-1, -1, -1, rows, -1, columns)
        return blocks.reshape(2, 3, 4 * rows, 5 * columns)

    gm = captured(forward)
    name_resizes(gm)
    torch.testing.assert_close(gm(X), forward(X), rtol=0, atol=0)


def test_upsampling_when_its_batch_is_dynamic_then_right_at_others():
    def forward(x):
        return x.repeat_interleave(2, 2).repeat_interleave(2, 3)

    gm = captured(forward, dynamic_shapes=({0: Dim("batch", max=8)},))
    assert name_resizes(gm).changed
    x = torch.randn(5, 3, 4, 5)
    torch.testing.assert_close(gm(x), F.interpolate(x, scale_factor=2), rtol=0, atol=0)
