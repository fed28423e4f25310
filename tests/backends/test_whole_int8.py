"""Weights in all of int8, -128 too, where they are multiplied with real numbers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pt2e_quant as pq
from pt2e_quant.backends.target.recipe import tables_of
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.flow.annotate.rules import QuantRule, RuleKind

BACKENDS = ["xnnpack", "onnx", "cpu"]
IDS = torch.arange(12).reshape(3, 4)


class Tied(nn.Module):
    """A table, a linear, and a head that computes with the table."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(64, 64)
        self.layer = nn.Linear(64, 64)
        self.head = nn.Linear(64, 64, bias=False)
        self.head.weight = self.table.weight
        with torch.no_grad():
            # The greatest magnitude of each row is negative: its code is -128.
            for weight in (self.table.weight, self.layer.weight):
                weight[:, ::7] -= weight.abs().amax(1, keepdim=True)

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.head(torch.tanh(self.layer(self.table(ids))))
        return result


def converted(backend: str, recipe: str) -> Any:
    program = torch.export.export(Tied().eval(), (IDS,))
    return pq.convert_pt2e(pq.prepare_pt2e(program, pq.backends.get(backend).quantizer(recipe)))


def integers_of(gm: Any) -> list[Tensor]:
    return [b for _, b in gm.named_buffers() if not b.is_floating_point() and b.shape == (64, 64)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_weight_only_when_the_least_integer_is_used_then_the_artifact_is_the_graph(backend):
    gm = converted(backend, "w8")
    weights = [w for w in integers_of(gm) if w.dtype is torch.int8]
    # By least squared error (ONNX) a row may use less than the whole range.
    assert min(int(weight.min()) for weight in weights) == -128
    artifact = pq.backends.get(backend).lower(gm)
    assert pq.sqnr_db([gm(IDS)], [artifact.run(IDS)]) > 80


@pytest.mark.parametrize("recipe", ["w8", "int8_dynamic", "w4_g32", "a8w4_g32"])
@pytest.mark.parametrize("backend", ["xnnpack", "onnx"])
def test_tied_table_when_read_by_a_head_then_both_have_one_constant(backend, recipe):
    if (backend, recipe) == ("xnnpack", "w4_g32"):
        pytest.skip("XNNPACK has no such recipe")
    gm = converted(backend, recipe)
    assert len(integers_of(gm)) <= 2  # the table and the layer


@pytest.mark.parametrize(("linears", "least"), [("w8", -128), ("int8_dynamic", -127), ("w4", -128)])
def test_tables_when_linears_round_activations_then_narrow(linears, least):
    rule = QuantRule(kind=RuleKind.GLOBAL, scheme=scheme_named("w8"))
    (made,) = tables_of([rule], scheme_named(linears))
    assert made.scheme is not None
    assert made.scheme.weight is not None
    assert made.scheme.weight.range == (least, 127)
