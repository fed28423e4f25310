"""Bfloat16 linear: xnnpack, int8."""

import torch
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "xnnpack", "int8", True
SIZES = [{"s0": 5}, {"s0": 7}, {"s0": 1}, {"s0": 16}]
DYNAMIC = {"x0": {0: Dim("s0", min=1, max=16)}}
BOUNDED = False


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m0 = nn.Linear(33, 16)

    def forward(self, x0):
        v0 = self.m0(x0)
        return v0


def model():
    torch.manual_seed(0)
    return Model().eval().to(torch.bfloat16)


def batch(seed, s0=5):
    torch.manual_seed(seed)
    x0 = torch.rand(s0, 33).to(torch.bfloat16)
    return (x0,), {}
