"""Quantizers whose transform gives another graph module back, as Arm's pass manager does."""

import copy

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from pt2e_quant.backends.cpu.backend import BACKEND
from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e

pytestmark = pytest.mark.usefixtures("unmeasured")


class Retraced:
    """Quantizes as ours does, on a copy of the graph that carries the same `meta`."""

    def __init__(self) -> None:
        self.inner = BACKEND.quantizer()
        self.algorithms = self.inner.algorithms

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        made = GraphModule(model, copy.deepcopy(model.graph))
        made.meta.update(model.meta)
        return made

    def annotate(self, model: GraphModule) -> GraphModule:
        return self.inner.annotate(model)

    def validate(self, model: GraphModule) -> None:
        self.inner.validate(model)


def test_convert_when_the_transform_gave_another_graph_then_its_code_is_current():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval(), torch.ones(1, 4)
    found = []
    for quantizer in (BACKEND.quantizer(), Retraced()):
        prepared = prepare_pt2e(torch.export.export(model, (x,)), quantizer)
        prepared(x)
        found.append(convert_pt2e(prepared)(x))
    assert torch.equal(*found)
