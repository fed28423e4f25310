"""Model 6 of the search: xnnpack, int8."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "xnnpack", "int8", True
SIZES = [{"s0": 2, "s1": 2}, {"s0": 3, "s1": 8}, {"s0": 9, "s1": 1}, {"s0": 1, "s1": 6}]
DYNAMIC = {"x0": {0: Dim("s0", min=1, max=9), 1: Dim("s1")}}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.p0 = nn.Parameter(torch.randn(24, 3))
        self.p1 = nn.Parameter(torch.randn(3, 5))
        self.m2 = nn.Linear(5, 8, bias=False)
        self.m2.weight.data *= 1.8e-06

    def forward(self, x0):
        v1 = torch.matmul(x0, self.p0) + 0.5
        v2 = F.linear(v1, self.p1.t() * 0.5)
        v3 = self.m2(v2)
        return (v3, 3)


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed, s0=2, s1=2):
    torch.manual_seed(seed)
    x0 = torch.randn(s0, s1, 24) * 1.4e03
    return (x0,), {}
