"""Pairs of layers: what is found between them, and why a layer is in none."""

import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.passes.algorithms.algorithm_graph import AlgorithmGraph
from pt2e_quant.passes.algorithms.gathered import Gathered
from pt2e_quant.passes.algorithms.layer_pairs import LayerPair, layer_pairs


class Branches(nn.Module):
    """Two readers of one relu, a sum that stops, and a pooled head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 1)
        self.left, self.right = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1)
        self.last, self.head = nn.Conv2d(8, 8, 1), nn.Linear(8, 2)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        x = self.last(self.left(x) + self.right(x))
        return self.head(nn.functional.max_pool2d(x, 2).mean((2, 3)))


def test_pairs_when_a_graph_branches_then_readers_together_and_reasons_for_the_rest():
    program = torch.export.export(Branches().eval(), (torch.randn(1, 3, 4, 4),))
    quantizer = pq.backends.get("onnx").quantizer("int8")
    gm = pq.prepare_pt2e(program, quantizer)
    for node in list(gm.graph.find_nodes(op="call_module")):
        node.replace_all_uses_with(node.all_input_nodes[0])
        gm.graph.erase_node(node)
    pairs, reasons = [], {}
    for found in layer_pairs(AlgorithmGraph(gm, Gathered())):
        if isinstance(found, LayerPair):
            names = [n.name for n in found.between], [n.name for n in found.readers]
            pairs.append((found.first.name, *names))
        else:
            reasons[found[0].name] = str(found[1])
    assert pairs == [
        ("conv2d", ["relu"], ["conv2d_1", "conv2d_2"]),
        ("conv2d_3", ["max_pool2d", "mean"], ["linear"]),
    ]
    text = "add is no function of one channel that keeps factors"
    assert reasons == {"conv2d_1": text, "conv2d_2": text}
