"""The float program behind a quantized graph."""

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.qdq import is_qdq
from pt2e_quant.graph.pipeline import run_passes
from pt2e_quant.graph.subgraphs import copy_graph
from pt2e_quant.passes.qdq.remove_qdq import remove_qdq
from pt2e_quant.passes.weights.unpack_weights import unpack_weights


@pytest.mark.parametrize("recipe", ["int8", "int8_dynamic", "w4_g32"])
def test_remove_qdq_when_a_graph_is_quantized_then_it_computes_on_rounded_weights(recipe):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)).eval()
    model.requires_grad_(False)
    x = torch.randn(4, 64)
    quantizer = pq.backends.get("onnx").quantizer(recipe)
    prepared = pq.prepare_pt2e(torch.export.export(model, (x,)), quantizer)
    pq.calibrate(prepared, [(x,)], progress=False)
    converted = pq.convert_pt2e(prepared, progress=False)
    made = copy_graph(converted)
    run_passes(made, (unpack_weights, remove_qdq))
    assert not any(is_qdq(node) for node in made.graph.nodes)
    assert any(is_qdq(node) for node in converted.graph.nodes)
    weights = [value for name, value in made.state_dict().items() if name.endswith("_dq")]
    first, second = (w for w in weights if w.dim() == 2)
    assert 0 < float((first - model[0].weight).abs().max()) < 0.02
    biases = [module.bias for module in (model[0], model[2])]
    expected = torch.relu(x @ first.T + biases[0]) @ second.T + biases[1]
    with torch.no_grad():
        assert torch.allclose(made(x), expected, atol=1e-3)
