"""The backend's passes on graphs: they fire, decline with a reason, keep values, and settle."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from pt2e_quant.backends.target.policy import place_integer_regions
from pt2e_quant.backends.xnnpack.backend import BACKEND
from pt2e_quant.backends.xnnpack.passes.data_movement import move_integers
from pt2e_quant.backends.xnnpack.passes.normalize_overloads import normalize_overloads
from pt2e_quant.backends.xnnpack.passes.pools_in_delegate import pool_by_depthwise
from pt2e_quant.backends.xnnpack.passes.refloat import refloat_leftovers, unfold_biases
from pt2e_quant.backends.xnnpack.passes.simplify import numbers_as_constants, simplify_for_table
from pt2e_quant.backends.xnnpack.policy import POLICY
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.graph.pipeline import GraphPass, PassResult
from pt2e_quant.passes.cleanup.strip_guards import strip_guards
from pt2e_quant.passes.qdq.duplicate_dequantize import duplicate_dequantize

BATCH = torch.export.Dim("batch", min=1, max=8)


class Body(nn.Module):
    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return self.body(x)


def captured(
    body: Callable[..., Any] | nn.Module, x: Tensor, *, dynamic: bool = True
) -> GraphModule:
    model = body if isinstance(body, nn.Module) else Body(body)
    shapes = ({0: BATCH},) if dynamic else None
    gm = torch.export.export(model.eval(), (x,), dynamic_shapes=shapes).module()
    strip_guards(gm)
    return gm


def calls(gm: GraphModule) -> list[str]:
    return [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]


def applied(gm: GraphModule, entry: GraphPass, *inputs: Tensor) -> PassResult:
    """Run a pass, and hold that values stay the same and that a second run changes nothing."""
    before = gm(*inputs)
    result = entry(gm)
    torch.testing.assert_close(gm(*inputs), before)
    assert not entry(gm).changed
    return result


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (lambda x: x.clamp(-1, 2), ["aten.hardtanh.default"]),
        (lambda x: x.clamp(min=0), ["aten.relu.default"]),
        (F.relu6, ["aten.hardtanh.default"]),
        (lambda x: x.flatten(1), ["aten.clone.default", "aten.view.default"]),
        (lambda x: x.mean((2, 3)), ["aten.mean.dim", "aten.view.default"]),
        (lambda x: F.adaptive_avg_pool2d(x, 1), ["aten.mean.dim"]),
        (lambda x: F.max_pool2d(x, 2), ["aten.max_pool2d.default"]),
        (
            lambda x: x[:, 1],
            ["aten.slice.Tensor", "aten.clone.default", "aten.view.default"],
        ),
        (
            lambda x: x @ x,
            [*["aten.clone.default", "aten.view.default"] * 2, "aten.bmm.default",
             "aten.view.default"],
        ),
    ],
)  # fmt: skip
def test_normalize_overloads_when_it_fires_then_the_partitioners_overload(
    body, expected, make_noise
):  # type: ignore[no-untyped-def]
    gm = captured(body, make_noise((2, 4, 6, 6)))
    assert applied(gm, normalize_overloads, make_noise((3, 4, 6, 6), 1)).changed
    assert calls(gm) == expected
    for node in gm.graph.nodes:
        if node.target is torch.ops.aten.view.default:
            assert all(isinstance(size, int) for size in node.args[1])


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (lambda x: x.mean(1), "it is not over the last two of four dimensions"),
        (lambda x: F.adaptive_avg_pool2d(x, 2), "it pools to more than one element"),
        (lambda x: x @ x[0, 0], "it is no batched product"),
        (lambda x: x.transpose(0, 1)[0].flatten(0, 1), "has that form already"),
    ],
)
def test_normalize_overloads_when_it_declines_then_says_why(body, reason, make_noise):  # type: ignore[no-untyped-def]
    gm = captured(body, make_noise((2, 4, 6, 6)))
    notes = [n.text for n in normalize_overloads(gm).notes if n.skipped]
    assert any(reason in text for text in notes) or reason == "has that form already"


def test_normalize_overloads_when_packed_heads_are_quantized_then_views(make_noise):  # type: ignore[no-untyped-def]
    limits = (0.05, 0, -128, 127, torch.int8)

    def products(x: torch.Tensor) -> torch.Tensor:
        heads = x.permute(1, 0, 3, 2, 4)[0]  # its strides are not those of the view it becomes
        q = torch.ops.quantized_decomposed.quantize_per_tensor(heads, *limits)
        y = torch.ops.quantized_decomposed.dequantize_per_tensor(q, *limits)
        return y @ y.transpose(-1, -2)

    gm = captured(products, make_noise((2, 3, 4, 6, 6)))
    assert applied(gm, normalize_overloads, make_noise((2, 3, 4, 6, 6), 1)).changed
    assert "aten.bmm.default" in calls(gm)


def test_simplify_when_silu_then_rows_of_the_table(make_noise):  # type: ignore[no-untyped-def]
    gm = captured(F.silu, make_noise((2, 6)))
    assert applied(gm, simplify_for_table, make_noise((3, 6), 1)).changed
    assert calls(gm) == ["aten.sigmoid.default", "aten.mul.Tensor"]


def test_numbers_when_operands_then_constant_tensors(make_noise):  # type: ignore[no-untyped-def]
    gm = captured(lambda x: (x + 3) * 0.5 / 7.0, make_noise((2, 6)))
    assert applied(gm, numbers_as_constants, make_noise((3, 6), 1)).changed
    assert calls(gm) == ["aten.add.Tensor", "aten.mul.Tensor", "aten.mul.Tensor"]
    operators = [n for n in gm.graph.nodes if n.op == "call_function"]
    assert all(isinstance(a, torch.fx.Node) for n in operators for a in n.args)


class Residual(nn.Module):
    """One add per case of the placement."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        inner = self.b(self.a(x) + self.c(x))  # between linears: integers
        stream = self.norm(x + inner)  # feeds a norm: float
        gated = torch.sigmoid(stream) * stream  # float inputs: float
        return self.d(gated), F.gelu(self.a(x)).softmax(-1)  # after a linear: float


def test_placement_when_light_operators_then_integers_only_between_integers(make_noise):  # type: ignore[no-untyped-def]
    gm = captured(Residual(), make_noise((2, 6)))
    quantizer = BACKEND.quantizer()
    quantizer.transform_for_annotation(gm)
    quantizer.annotate(gm)
    annotated = {n.name for n in gm.graph.nodes if "quantization_annotation" in n.meta}
    reasons = {f.node: f.reason for f in provenance_of(gm).floats}
    adds = [n.name for n in gm.graph.nodes if n.target is torch.ops.aten.add.Tensor]
    assert adds[0] in annotated
    assert "normalization" in reasons[adds[1]]
    assert "inputs that are integers already" in reasons["sigmoid"]
    assert "no linear before it" in reasons["gelu"]
    assert "softmax is float only" in reasons["softmax"]


def test_placement_when_run_twice_then_same_marks(make_noise):  # type: ignore[no-untyped-def]
    gm = captured(Residual(), make_noise((2, 6)))
    assert place_integer_regions(POLICY)(gm).notes == place_integer_regions(POLICY)(gm).notes


class Capped(nn.Module):
    """Logits between -30 and 30, as Gemma 2's."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.head(x) / 30) * 30


def test_placement_when_logits_are_capped_then_tanh_is_float(make_noise):  # type: ignore[no-untyped-def]
    gm = captured(Capped(), make_noise((2, 6)))
    reasons = {n.node: n.text for n in place_integer_regions(POLICY)(gm).notes}
    assert "linear" in reasons["tanh"]


def quantized(body, x, every_row, quantize_with) -> GraphModule:  # type: ignore[no-untyped-def]
    gm = quantize_with(Body(body), (x,), every_row(), dynamic=True)
    duplicate_dequantize(gm)
    return gm


def test_move_integers_when_expanded_then_no_qdq_around_it(every_row, quantize_with, make_noise):  # type: ignore[no-untyped-def]
    x = make_noise((2, 1, 5))
    gm = quantized(lambda x: torch.relu(x).expand(-1, 4, -1), x, every_row, quantize_with)
    before = len(gm.graph.nodes)
    assert applied(gm, move_integers, make_noise((3, 1, 5), 1)).changed
    assert len(gm.graph.nodes) == before - 2
    (expand,) = (n for n in gm.graph.nodes if n.target is torch.ops.aten.expand.default)
    assert expand.meta["val"].dtype is torch.int8


def test_pooling_when_average_then_depthwise(every_row, quantize_with, make_noise):  # type: ignore[no-untyped-def]
    x = make_noise((2, 3, 8, 8))
    gm = quantized(lambda x: F.avg_pool2d(x, 3, 2, 1), x, every_row, quantize_with)
    assert pool_by_depthwise(gm).changed
    assert "aten.avg_pool2d.default" not in calls(gm)
    assert not pool_by_depthwise(gm).changed
    assert pool_by_depthwise(captured(lambda x: F.avg_pool2d(x, 2), x)).notes[0].skipped


def test_refloat_when_every_form_fits_then_nothing_changes(quantize_with, make_noise):  # type: ignore[no-untyped-def]
    x = make_noise((2, 6))
    gm = quantize_with(nn.Sequential(nn.Linear(6, 5), nn.ReLU()), (x,), BACKEND.quantizer())
    assert not refloat_leftovers(gm).changed
    assert not unfold_biases(gm).changed
