"""split, chunk and tensor_split become slices; what has no fixed sizes stays."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pt2e_quant.passes.cleanup.split_as_slices import split_as_slices, unbind_as_selects


class Call(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


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
