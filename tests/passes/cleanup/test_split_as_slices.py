"""split, chunk and tensor_split become slices; what has no fixed sizes stays."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pt2e_quant as pq
from pt2e_quant.passes.cleanup.join_and_split import (
    chunk_by_sizes,
    split_as_slices,
    unbind_as_selects,
)
from tests.call_function import Call


def captured(function: Any, x: Tensor, **kwargs: Any) -> Any:
    return torch.export.export(Call(function), (x,), **kwargs).module()


def names(gm: Any) -> list[str]:
    return [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.split(2, 1),
        lambda x: x.split([1, 5], 1),
        lambda x: x.chunk(4, -1),
        lambda x: x.tensor_split(3, 1),
        lambda x: x.chunk(3, 1)[-1],
    ],
)
def test_split_when_sizes_are_known_then_each_part_is_a_slice(function: Any) -> None:
    x = torch.randn(2, 6, 9)
    gm = captured(function, x)
    expected = gm(x)
    assert split_as_slices(gm).changed
    assert all("slice" in name or "_guards" in name for name in names(gm)), names(gm)
    torch.testing.assert_close(gm(x), expected, rtol=0, atol=0)
    assert not split_as_slices(gm).changed


def test_split_when_size_is_dynamic_then_it_stays() -> None:
    x = torch.randn(6, 4)
    gm = captured(lambda x: x.chunk(2, 0), x, dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    assert not split_as_slices(gm).changed
    assert any("chunk" in name for name in names(gm))


def test_split_when_values_are_integers_then_it_stays() -> None:
    gm = captured(lambda x: x.chunk(2, 1), torch.arange(12).reshape(2, 6))
    assert not split_as_slices(gm).changed


def test_unbind_when_asked_then_it_stays() -> None:
    gm = captured(lambda x: x.unbind(1), torch.randn(2, 3))
    assert not split_as_slices(gm).changed


def test_unbind_when_parts_are_read_then_each_is_a_select() -> None:
    def outer(x: Tensor) -> Tensor:
        first, _, last = x.unbind(1)
        return first - last

    x = torch.randn(2, 3, 4)
    gm = captured(outer, x)
    expected = gm(x)
    assert unbind_as_selects(gm).changed
    made = [name for name in names(gm) if "_guards" not in name]
    assert made == ["aten.select.int", "aten.select.int", "aten.sub.Tensor"]
    torch.testing.assert_close(gm(x), expected, rtol=0, atol=0)
    assert not unbind_as_selects(gm).changed


@pytest.mark.parametrize("count", [2, 3, 4])
def test_chunk_when_its_size_is_dynamic_then_slices_of_that_size(count: int) -> None:
    x = torch.randn(8, 4)
    size = torch.export.Dim("size", min=4, max=16) * 2
    gm = captured(lambda x: x.chunk(count, 0)[1:], x, dynamic_shapes=({0: size},))
    assert chunk_by_sizes(gm).changed
    assert not any("chunk" in name for name in names(gm))
    for rows in (8, 12, 14, 32):
        x = torch.randn(rows, 4)
        expected = x.chunk(count, 0)
        if len(expected) == count:
            torch.testing.assert_close(list(gm(x)), list(expected[1:]), rtol=0, atol=0)
    assert not chunk_by_sizes(gm).changed


def test_chunk_when_its_size_is_dynamic_then_onnx_runtime_takes_every_size() -> None:
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Call(lambda x: x.chunk(2, 1)[1]))
    calls = [torch.randn(2, columns, 4) for columns in (8, 2, 16)]
    size = torch.export.Dim("size", min=1, max=8) * 2
    artifact = pq.quantize(
        model,
        (calls[0],),
        dynamic_shapes=({1: size},),
        calibration_data=[(x,) for x in calls],
        backend="onnx",
        progress=False,
    )
    for x in calls:
        torch.testing.assert_close(artifact.run(x), model(x), rtol=0, atol=0.05)


def test_chunk_when_its_size_is_known_then_split_by_sizes() -> None:
    x = torch.randn(2, 5)
    gm = captured(lambda x: x.chunk(2, 1)[-1], x)
    assert chunk_by_sizes(gm).changed
    assert "aten.split_with_sizes.default" in names(gm)
    torch.testing.assert_close(gm(x), x[:, 3:], rtol=0, atol=0)
