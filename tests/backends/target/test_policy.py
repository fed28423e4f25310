"""Light operators: integers between integers, float elsewhere, always with the reason."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pt2e_quant as pq
from pt2e_quant.backends.onnx.backend import BACKEND
from pt2e_quant.backends.onnx.policy import POLICY
from pt2e_quant.backends.target.policy import FLOAT_INPUTS, READ_IN_FLOAT, place_integer_regions
from pt2e_quant.backends.xnnpack.backend import BACKEND as XNNPACK
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e
from pt2e_quant.graph.op_table import KEEP_FLOAT_KEY

PLACE = place_integer_regions(POLICY)


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


def marks(model: nn.Module, *args: Tensor) -> dict[str, Any]:
    gm: Any = torch.export.export(model.eval(), args).module()
    PLACE(gm)
    return {n.name: n.meta.get(KEEP_FLOAT_KEY) for n in gm.graph.nodes if n.name.startswith("add")}


def test_place_integer_regions_when_inputs_or_readers_are_float_then_it_says_so() -> None:
    assert marks(Mixed(), torch.randn(1, 4, 4, 4)) == {
        "add": None,
        "add_1": ("light", FLOAT_INPUTS.name),
        "add_2": ("light", READ_IN_FLOAT.name),
    }


def test_place_integer_regions_when_a_view_stands_between_then_it_looks_through() -> None:
    class Viewed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x).flatten(2)
            return self.conv((y + y).reshape(x.shape))

    assert marks(Viewed(), torch.randn(1, 4, 4, 4)) == {"add": None}


class Pooled(nn.Module):
    """Mean and deviation over time, weighed by an attention: a variance of float values."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv1d(8, 16, 3, padding=1), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv(x))
        weight = torch.softmax(x.cumsum(2), 2)
        mean = (x * weight).sum(2)
        variance = ((x**2 * weight).sum(2) - mean**2).clamp(min=1e-4)
        return self.fc(torch.cat((mean, torch.sqrt(variance)), 1))


@pytest.mark.parametrize("backend", [BACKEND, XNNPACK], ids=["onnx", "xnnpack"])
def test_prepare_when_a_pair_of_light_operators_stays_float_then_each_of_it_does(backend) -> None:
    ep = torch.export.export(Pooled().eval(), (torch.randn(2, 8, 20),))
    prepared = prepare_pt2e(ep, backend.quantizer())
    reasons = {r.node: r.reason for r in provenance_of(prepared).floats}
    for name in ("sub", "clamp"):
        assert "inputs that are integers already" in reasons[name]


def test_prepare_when_residual_sums_are_of_linears_then_their_reason_is_recorded() -> None:
    ep = torch.export.export(Mixed().eval(), (torch.randn(1, 4, 4, 4),))
    prepared = prepare_pt2e(ep, BACKEND.quantizer())
    reasons = {r.node: r.reason for r in provenance_of(prepared).floats}
    assert "inputs that are integers already" in reasons["add_1"]
    assert "a reader that works in integers" in reasons["add_2"]
    assert "add" not in reasons
    assert "no integer LayerNormalization" in reasons["layer_norm"]


def test_place_integer_regions_when_run_twice_then_marks_are_the_same() -> None:
    gm: Any = torch.export.export(Mixed().eval(), (torch.randn(1, 4, 4, 4),)).module()
    PLACE(gm)
    first = {n.name: n.meta.get(KEEP_FLOAT_KEY) for n in gm.graph.nodes}
    PLACE(gm)
    assert first == {n.name: n.meta.get(KEEP_FLOAT_KEY) for n in gm.graph.nodes}


def test_quantizer_when_a_preference_is_overruled_then_its_operators_are_quantized() -> None:
    ep = torch.export.export(Mixed().eval(), (torch.randn(1, 4, 4, 4),))
    prepared = prepare_pt2e(ep, BACKEND.quantizer().allowing("float_inputs", "read_in_float"))
    left = {r.node for r in provenance_of(prepared).floats}
    assert "layer_norm" in left
    assert not left & {"add", "add_1", "add_2"}


def test_quantizer_when_a_preference_is_unknown_then_near_names() -> None:
    with pytest.raises(
        ConfigError, match='no preference "float_input": did you mean "float_inputs"'
    ):
        BACKEND.quantizer().allowing("float_input")


def test_xnnpack_when_norm_inputs_are_allowed_then_what_reads_them_is_placed_anew() -> None:
    class Stream(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            total = self.a(x) + self.b(x)
            return self.norm(total), self.a(torch.neg(total))

    ep = torch.export.export(Stream().eval(), (torch.randn(2, 4),))
    for names, left in (((), {"add", "neg"}), (("norm_inputs",), set())):
        prepared = prepare_pt2e(ep, XNNPACK.quantizer().allowing(*names))
        assert {r.node for r in provenance_of(prepared).floats} - {"layer_norm"} == left


def test_prepare_when_a_sum_with_relu_stays_float_then_its_relu_moves_integers_alone() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv1d(4, 4, 1), nn.Conv1d(4, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            total = (self.a(x) + 0.0) + self.b(x)
            return self.b(torch.relu(total))

    ep = torch.export.export(Sum().eval(), (torch.randn(1, 4, 6),))
    prepared = prepare_pt2e(ep, BACKEND.quantizer())
    assert "relu" not in {r.node for r in provenance_of(prepared).floats}


class Scaled(nn.Module):
    """Functions behind convolutions whose batch norms train, and a dropout before the head."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, bias=False), nn.Conv2d(8, 8, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(8), nn.BatchNorm2d(8)])
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(8, 4)

    def forward(self, x):
        y = functional.leaky_relu(self.norms[0](self.first(x)))
        y = y + functional.leaky_relu(self.norms[1](self.second(y)))
        return self.head(self.dropout(torch.sigmoid(y).mean((2, 3))))


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("name", ["onnx", "xnnpack", "cpu"])
def test_regions_when_batch_norms_train_then_those_of_the_deployed_graph(name):
    quantizer, x = pq.backends.get(name).quantizer("int8"), torch.randn(2, 3, 9, 9)
    if name != "cpu":  # training brings no algorithms
        quantizer = quantizer.remove_algorithm("run_time_scales")
    program = torch.export.export(Scaled().eval(), (x,))
    trained = torch.export.export(Scaled().train(), (x,))
    found = [
        {(f.op, f.reason) for f in pq.provenance_of(prepared).floats}
        for prepared in (
            pq.prepare_pt2e(program, quantizer),
            pq.prepare_qat_pt2e(trained, quantizer),
        )
    ]
    assert found[0] == found[1]
    assert name == "cpu" or "aten.leaky_relu" not in {op for op, _ in found[0]}
