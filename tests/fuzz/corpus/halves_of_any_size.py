"""Halves along a Dim.AUTO: onnx, int8."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "onnx", "int8", True
SIZES = [{"s0": 6}, {"s0": 2}, {"s0": 8}]
DYNAMIC = {"x0": {0: Dim.AUTO}}
BOUNDED = False


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m0 = nn.Linear(8, 8)

    def forward(self, x0):
        v0 = self.m0(x0)
        v1 = torch.tensor_split(v0, 2, dim=0)[0]
        return v1


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed, s0=6):
    torch.manual_seed(seed)
    x0 = torch.randn(s0, 8)
    return (x0,), {}
