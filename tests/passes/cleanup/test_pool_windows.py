"""Pools whose windows are all whole lose `ceil_mode`, and adaptive ones get a kernel."""

import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.export import Dim

from pt2e_quant.graph.ops import argument
from pt2e_quant.graph.pipeline import run_passes
from pt2e_quant.passes.cleanup.pool_windows import fixed_windows
from tests.call_function import Call

aten = torch.ops.aten
POOLS = {
    (1, "max"): F.max_pool1d,
    (2, "max"): F.max_pool2d,
    (3, "max"): F.max_pool3d,
    (1, "avg"): F.avg_pool1d,
    (2, "avg"): F.avg_pool2d,
    (3, "avg"): F.avg_pool3d,
}


def noise(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def exported(function, x, shapes=None):
    return torch.export.export(Call(function), (x,), dynamic_shapes=shapes).module()


def pools_of(gm):
    return [n for n in gm.graph.nodes if "pool" in str(n.target)]


@settings(max_examples=80, deadline=None)
@given(
    rank=st.integers(1, 3),
    kind=st.sampled_from(("max", "avg")),
    size=st.lists(st.integers(3, 9), min_size=3, max_size=3),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    padding=st.integers(0, 1),
    counts=st.booleans(),
)
def test_pools_when_rounded_up_then_down_where_it_adds_no_window(
    rank, kind, size, kernel, stride, padding, counts
):
    assume(padding <= kernel // 2)
    x, asked = noise(2, 3, *size[:rank]), {"count_include_pad": counts} if kind == "avg" else {}

    def pool(x, *, ceil):
        return POOLS[rank, kind](x, kernel, stride, padding, ceil_mode=ceil, **asked)

    gm = exported(lambda x: pool(x, ceil=True), x)
    expected = gm(x)
    run_passes(gm, (fixed_windows,))
    adds_none = pool(x, ceil=False).shape == expected.shape
    (found,) = pools_of(gm)
    assert argument(found, "ceil_mode") is not adds_none
    torch.testing.assert_close(gm(x), expected, rtol=0, atol=0)
    assert not run_passes(gm, (fixed_windows,))[0].changed


def test_pools_when_sizes_are_known_to_divide_then_rounded_down_at_run_time():
    x, half = noise(2, 3, 8, 12), Dim("half", min=2, max=16)
    gm = exported(lambda x: F.avg_pool2d(x, 2, ceil_mode=True), x, {"x": {2: 2 * half}})
    run_passes(gm, (fixed_windows,))
    assert not argument(pools_of(gm)[0], "ceil_mode")
    other = noise(2, 3, 14, 12)
    torch.testing.assert_close(gm(other), F.avg_pool2d(other, 2))


def test_pools_when_windows_reach_over_the_end_at_run_time_then_left():
    x, half = noise(2, 3, 8, 12), Dim("half", min=2, max=16)
    gm = exported(lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True), x, {"x": {2: 2 * half}})
    record = run_passes(gm, (fixed_windows,))[0]
    assert [note.text for note in record.notes] == ["its last windows reach over the end"]


@settings(max_examples=30, deadline=None)
@given(
    size=st.lists(st.integers(1, 8), min_size=2, max_size=2),
    count=st.lists(st.integers(1, 4), min_size=2, max_size=2),
)
def test_adaptive_pools_when_their_sizes_divide_then_have_a_kernel(size, count):
    x = noise(2, 3, *size)
    gm = exported(lambda x: F.adaptive_avg_pool2d(x, count), x)
    expected = gm(x)
    run_passes(gm, (fixed_windows,))
    divides = all(s % c == 0 for s, c in zip(size, count, strict=True)) and count != [1, 1]
    wanted = [] if divides and size == count else [aten.avg_pool2d.default]
    left = [n.target for n in pools_of(gm)]
    assert left == (wanted if divides else [aten.adaptive_avg_pool2d.default])
    torch.testing.assert_close(gm(x), expected)
