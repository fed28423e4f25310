"""A batch that an operator cannot take: the error names it, the operator and its line."""

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.errors import CalibrationError
from pt2e_quant.flow.calibrate.calibrate_by_block import calibrate_by_block

IDS = torch.tensor([[3, 1, 4, 1, 5]])


class Lookup(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.table = nn.Embedding(20, 8)

    def forward(self, ids):
        x = self.table(ids * 2)
        for layer in self.norms:
            x = torch.relu(layer(x))
        return x


def prepared():
    torch.manual_seed(0)
    program = torch.export.export(Lookup().eval(), (IDS,))
    quantizer = pq.backends.get("onnx").allowing_slower().quantizer("int8")
    return pq.prepare_pt2e(program, quantizer)


@pytest.mark.parametrize("run", [pq.calibrate, calibrate_by_block])
def test_calibrate_when_an_index_is_outside_its_table_then_batch_and_node_are_named(run):
    with pytest.raises(CalibrationError) as caught:
        run(prepared(), [(IDS,), (IDS + 18,)], progress=False)
    text = str(caught.value)
    assert text.startswith("calibration batch 1 stops the model: index out of range")
    assert caught.value.node_name == "embedding"
    assert "module  table" in text
    assert "x = self.table(ids * 2)" in text


def test_calibrate_when_the_callers_own_observer_raises_then_its_error_comes_through():
    def refuse(x):
        raise KeyError("mine")

    graph = prepared()
    name = next(n.target for n in graph.graph.nodes if n.op == "call_module")
    graph.get_submodule(name).forward = refuse
    with pytest.raises(KeyError, match="mine"):
        pq.calibrate(graph, [(IDS,)], progress=False)
