"""Model 11 of the search: cpu, w4_g32."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "cpu", "w4_g32", False
SIZES = [{"s0": 3, "s1": 2}, {"s0": 9, "s1": 14}, {"s0": 2, "s1": 16}, {"s0": 2, "s1": 1}]
DYNAMIC = {"x0": {0: Dim("s0", min=2, max=9), 1: Dim.AUTO}}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m0 = nn.Linear(8, 8)
        self.m0.weight.data.abs_()
        self.m1 = nn.Linear(8, 8)
        self.m1.weight.data.view(-1)[0] = 20.0

    def forward(self, x0):
        v0 = self.m0(x0)
        v1 = self.m1(v0)
        v2 = 0.1 - v1
        v3 = v2.expand(
            2,
            -1,
            -1,
            -1,
        )
        v4 = v3.clone()
        return (v4, v3)


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed, s0=3, s1=2):
    torch.manual_seed(seed)
    x0 = torch.randn(s0, s1, 8)
    return (x0,), {}
