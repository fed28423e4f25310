"""A submodule named as an attribute of a graph: onnx, int8."""

import torch
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "onnx", "int8", True
SIZES = [{"s0": 2}, {"s0": 1}, {"s0": 5}]
DYNAMIC = {"x0": {0: Dim("s0", max=8)}}
BOUNDED = False


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.code = nn.Embedding(6, 8)
        self.graph = nn.Linear(6, 8)

    def forward(self, x0):
        return self.graph(x0) + self.code(x0.argmax(-1))


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed, s0=2):
    torch.manual_seed(seed)
    x0 = torch.randn(s0, 6)
    return (x0,), {}
