"""Model 34 of the search: onnx, int8_dynamic."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "onnx", "int8_dynamic", False
SIZES = [{"s0": 6}, {"s0": 16}, {"s0": 7}, {"s0": 1}]
DYNAMIC = {"x0": {0: Dim("s0", min=1, max=20)}}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m0 = nn.Linear(7, 4)
        self.m2 = nn.Linear(4, 17)
        self.m2.weight.data.zero_()
        self.register_buffer("c3", torch.rand(17))

    def forward(self, x0):
        v0 = self.m0(x0)
        v2 = F.elu(v0)
        v3 = self.m2(v2)
        v4 = v3 - self.c3
        v5 = F.softshrink(v4)
        return v5


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed, s0=6):
    torch.manual_seed(seed)
    x0 = torch.rand(s0, 7).transpose(0, -1).contiguous().transpose(0, -1)
    return (x0,), {}
