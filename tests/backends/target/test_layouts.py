"""Float operators that keep a layout: which belong together, and beside which convolutions."""

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.backends.target.in_float import computed_reads
from pt2e_quant.backends.target.layouts import layouts

pytest.importorskip("onnxruntime")


class Mixed(nn.Module):
    """Convolutions with functions of each element between them, and one that mixes pixels."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(4))
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x):
        x = self.norm(nn.functional.gelu(self.convs[0](x)))
        y = x + nn.functional.gelu(self.convs[1](x))
        y = self.convs[2](y).softmax(-1)
        return self.convs[3](nn.functional.gelu(y))


@pytest.fixture(scope="module")
def graph():
    torch.manual_seed(0)
    x = torch.randn(1, 4, 8, 8)
    program = torch.export.export(Mixed().eval(), (x,))
    quantizer = pq.backends.get("onnx").quantizer("int8").allowing("slower")
    prepared = pq.prepare(program, quantizer, effort="fast")
    return pq.convert(pq.calibrate(prepared, [(x,)], progress=False), progress=False)


def test_layouts_when_functions_and_sums_are_between_convolutions_then_they_are_one(graph):
    judged = [n for n in graph.graph.nodes if computed_reads(graph, n) and "conv" in n.name]
    first, second = sorted(layouts(graph, judged), key=lambda one: len(one.convs), reverse=True)
    assert {n.name for n in first.convs} == {"conv2d", "conv2d_1", "conv2d_2"}
    assert {"gelu", "gelu_1", "add"} <= {n.name for n in first.operators}
    assert {n.name for n in second.convs} == {"conv2d_3"}, "softmax keeps no layout"
    assert {n.name for n in second.operators} == {"gelu_2"}


def test_layouts_when_an_operator_may_be_in_integers_then_it_is_in_none(graph):
    judged = {n for n in graph.graph.nodes if computed_reads(graph, n)}
    assert not judged & {n for one in layouts(graph, judged) for n in one.operators}
