import torch
from torch import nn

from pt2e_quant.flow.node_outputs import NodeSourceDebugInfo, _origins


def test_origins_when_exported_twice_then_the_same_names():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4)
    graphs = [torch.export.export(model, (x,)).module() for _ in range(2)]
    first, second = ({n.name: info for n, info in _origins(gm)} for gm in graphs)
    assert first == second
    assert first["linear"] == NodeSourceDebugInfo("linear", graph_id=0)
    assert "input" not in first
