"""Canonical graphs that return values of their own."""

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.backends.cut_graph import cut_behind, values_to_compare, with_values

X = (torch.linspace(-1, 1, 12).reshape(3, 4),)


@pytest.fixture
def quantized():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    program = torch.export.export(model, X)
    prepared = pq.prepare(program, pq.backends.get("xnnpack").quantizer("int8"))
    return pq.convert(pq.calibrate(prepared, [X], progress=False))


def test_with_values_when_values_are_named_then_they_follow_the_results(quantized):
    names = [node.name for node in values_to_compare(quantized)]
    before = quantized.code
    tapped, places = with_values(quantized, names)
    results = tapped(*X)
    assert torch.equal(results[0], quantized(*X))
    assert len(places) == len(names) > 2
    for name, at in zip(names, places, strict=True):
        assert torch.equal(results[at], cut_behind(quantized, name)(*X)[0])
    assert quantized.code == before


def test_with_values_when_a_value_is_a_result_already_then_it_is_not_returned_twice(quantized):
    (result,) = quantized.graph.output_node().all_input_nodes
    tapped, places = with_values(quantized, [result.name])
    assert places == [0]
    assert len(tapped(*X)) == 1
