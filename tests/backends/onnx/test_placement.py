"""Light operators: integers between integers, float elsewhere, always with the reason."""

from typing import Any

import torch
from torch import Tensor, nn

from pt2e_quant.backends.onnx.backend import BACKEND
from pt2e_quant.backends.onnx.conditions import FLOAT_INPUTS, KEEP_FLOAT, READ_IN_FLOAT
from pt2e_quant.backends.onnx.placement import place_light
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e


class Mixed(nn.Module):
    """A sum of two convolutions, one of linears, and a sum that only a norm reads."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.conv2 = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.fc, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        between = self.conv(x) + self.conv2(x)
        linear = self.fc(x) + x
        read = self.norm(self.conv(between) + between)
        return between, linear, read


def marks(model: nn.Module, *args: Tensor) -> dict[str, str | None]:
    gm: Any = torch.export.export(model.eval(), args).module()
    place_light(gm)
    return {n.name: n.meta.get(KEEP_FLOAT) for n in gm.graph.nodes if n.name.startswith("add")}


def test_place_light_when_inputs_or_readers_are_float_then_it_says_so() -> None:
    assert marks(Mixed(), torch.randn(1, 4, 4, 4)) == {
        "add": None,
        "add_1": FLOAT_INPUTS,
        "add_2": READ_IN_FLOAT,
    }


def test_place_light_when_a_view_stands_between_then_it_looks_through() -> None:
    class Viewed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x).flatten(2)
            return self.conv((y + y).reshape(x.shape))

    assert marks(Viewed(), torch.randn(1, 4, 4, 4)) == {"add": None}


def test_prepare_when_residual_sums_are_of_linears_then_their_reason_is_recorded() -> None:
    ep = torch.export.export(Mixed().eval(), (torch.randn(1, 4, 4, 4),))
    prepared = prepare_pt2e(ep, BACKEND.quantizer())
    reasons = {r.node: r.reason for r in provenance_of(prepared).floats}
    assert "inputs that are integers already" in reasons["add_1"]
    assert "a reader that takes integers" in reasons["add_2"]
    assert "add" not in reasons
    assert "no integer LayerNormalization" in reasons["layer_norm"]


def test_place_light_when_run_twice_then_marks_are_the_same() -> None:
    gm: Any = torch.export.export(Mixed().eval(), (torch.randn(1, 4, 4, 4),)).module()
    place_light(gm)
    first = {n.name: n.meta.get(KEEP_FLOAT) for n in gm.graph.nodes}
    place_light(gm)
    assert first == {n.name: n.meta.get(KEEP_FLOAT) for n in gm.graph.nodes}
