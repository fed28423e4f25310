"""Means at places: onnx, int8."""

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
        self.m0 = nn.Linear(6, 8)

    def forward(self, x0):
        v0 = self.m0(x0)
        places = torch.arange(8).remainder(3).expand_as(v0)
        return torch.zeros(x0.shape[0], 4).scatter_reduce(1, places, v0, "mean", include_self=False)


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed, s0=2):
    torch.manual_seed(seed)
    x0 = torch.randn(s0, 6)
    return (x0,), {}
