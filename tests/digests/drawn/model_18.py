"""Model 18 of the search: xnnpack, int8."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "xnnpack", "int8", True
SIZES = [{"s1": 4}, {"s1": 12}, {"s1": 1}, {"s1": 16}]
DYNAMIC = {"x1": {1: Dim("s1", min=1, max=64)}}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.p0 = nn.Parameter(torch.randn(10, 20))
        self.m1 = nn.Linear(20, 13, bias=False)

    def forward(self, x1):
        v0 = F.linear(x1, self.p0.t())
        v1 = self.m1(v0)
        v4 = v1.flatten()
        return v4


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed, s1=4):
    torch.manual_seed(seed)
    x1 = torch.randn(5, s1, 10)
    return (x1,), {}
