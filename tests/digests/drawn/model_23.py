"""Model 23 of the search: cpu, int8."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "cpu", "int8", True
SIZES = [{"s0": 8}, {"s0": 1}, {"s0": 8}, {"s0": 8}]
DYNAMIC = {"x0": {0: Dim("s0", min=1, max=8)}}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m0 = nn.Linear(2, 32, bias=False)
        self.m1 = nn.Linear(32, 3)

    def forward(self, x0):
        v0 = self.m0(x0)
        v1 = self.m1(v0)
        v2 = torch.frac(v1)
        v3 = torch.cat([v2, v2, v2], 1)
        v4 = torch.maximum(v3, torch.tensor(1.5).to(v3))
        v7 = torch.lerp(v3, v4, 0.3)
        return v7


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed, s0=8):
    torch.manual_seed(seed)
    x0 = torch.cat([torch.randn(s0, 2), torch.randn(s0, 2)], -1)[..., ::2]
    return (x0,), {}
