"""Rows written along an axis: no transposes are left, and every element is what it was."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

from pt2e_quant.backends.onnx.rewrites.pipeline import write_rows

ROOM, BATCH = 12, 3


class Caches(nn.Module):
    """Keys and values written at the same places; values come turned round."""

    def forward(self, at: Tensor, keys: Tensor, values: Tensor, new: Tensor) -> tuple[Tensor, ...]:
        turned = new.transpose(1, 2)
        return keys.index_copy(2, at, turned * 2), values.index_copy(2, at, turned)


def arguments(places: list[int], seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    cache = torch.randn(2, BATCH, 3, ROOM, 4, generator=generator)
    new = torch.randn(BATCH, len(places), 3, 4, generator=generator)
    return torch.tensor(places), cache[0], cache[1], new


@pytest.fixture(scope="module")
def caches(exported):
    tokens = torch.export.Dim("tokens", min=1, max=ROOM)
    shapes = {"at": {0: tokens}, "keys": None, "values": None, "new": {1: tokens}}
    return exported(Caches(), arguments([0, 1]), shapes).apply(write_rows, fired=2)


@given(places=st.permutations(range(ROOM)), count=st.integers(1, ROOM), seed=st.integers(0, 9))
@settings(max_examples=25)
def test_write_rows_when_places_vary_then_equal(caches, places, count, seed):
    caches.equals(*arguments(places[:count], seed))


def test_write_rows_when_two_caches_have_one_shape_then_places_are_made_once(caches):
    ops = caches.ops()
    assert ops["ScatterND"] == 2
    assert ops["Add"] == 1
    assert ops["Transpose"] == 1  # of the new rows alone


class Inner(nn.Module):
    """Writes that have rows of an inner axis, counted from the end too."""

    def forward(self, x: Tensor, at: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        put = x.clone()
        put[:, -at] = a
        return x.index_copy(1, at, a), x.index_copy(2, at, b), put


def test_write_rows_when_axis_is_an_inner_one_then_no_transpose_is_left(exported):
    args = (
        torch.randn(5, 6, 7, 8),
        torch.tensor([4, 1]),
        torch.randn(5, 2, 7, 8),
        torch.randn(5, 6, 2, 8),
    )
    program = exported(Inner(), args).apply(write_rows, fired=3)
    assert "Transpose" not in program.ops()
    program.equals(*args)


class Others(nn.Module):
    """Outermost and last axis, sums, pairs of places, a dynamic size before the axis."""

    def forward(self, x: Tensor, at: Tensor, rows: Tensor, batched: Tensor) -> tuple[Tensor, ...]:
        y = x[0]
        pairs = y.clone()
        pairs[:, at, at] = rows[0, 0, :, :2]
        return (
            y.index_copy(0, at, rows[0]),
            y.index_copy(3, at, rows[0].permute(1, 3, 2, 0)),
            torch.ops.aten.index_put(y, [None, at], rows[0].transpose(0, 1), True),
            pairs,
            batched.index_copy(1, at, batched[:, :2] + 1),
        )


def test_write_rows_when_it_is_another_write_then_it_declines(exported):
    size = torch.export.Dim("size", min=1, max=8)
    args = (
        torch.randn(1, 6, 6, 6, 6),
        torch.tensor([4, 1]),
        torch.randn(1, 2, 6, 6, 6),
        torch.randn(2, 6, 4),
    )
    shapes = {"x": None, "at": None, "rows": None, "batched": {0: size}}
    program = exported(Others(), args, shapes)
    assert program.ops()["ScatterND"] == 5
    program.apply(write_rows, fired=0).equals(*args)
