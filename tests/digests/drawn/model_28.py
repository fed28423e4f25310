"""Model 28 of the search: onnx, lut4."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "onnx", "lut4", True
SIZES = [{"s0": 3}, {"s0": 16}, {"s0": 5}, {"s0": 2}]
DYNAMIC = {"x1": {0: Dim.AUTO}}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m0 = nn.Linear(16, 12)

    def forward(self, x1):
        v2 = F.threshold(x1, 0.1, 0.0)
        v4 = self.m0(v2)
        return v4


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed, s0=3):
    torch.manual_seed(seed)
    x1 = torch.rand(s0, 16)
    return (x1,), {}
