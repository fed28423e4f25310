"""Model 1 of the search: onnx, int8."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "onnx", "int8", True
SIZES = [{}]
DYNAMIC = None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m0 = nn.Linear(8, 8)
        self.m0.weight.data.zero_()
        self.m1 = nn.Linear(8, 8)
        self.m1.weight = self.m0.weight

    def forward(self, x1, x2):
        v0 = self.m0(x1)
        v2 = F.gelu(v0)
        v3 = self.m1(v2)
        v4 = v3 + x2
        return (v4, v2)


def model():
    torch.manual_seed(0)
    return Model().eval().to(torch.float64)


def batch(seed):
    torch.manual_seed(seed)
    x1 = (torch.randn(2, 8) + -3.0).to(torch.float64)
    x2 = torch.randn(2, 8).to(torch.float64)
    return (x1,), {"x2": x2}
