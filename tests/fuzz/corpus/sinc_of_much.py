"""A function that enlarges the rounding of the product before it: cpu, w4_g32."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "cpu", "w4_g32", True
SIZES = [{"s0": 4}, {"s0": 8}, {"s0": 1}]
DYNAMIC = {"x0": {0: Dim("s0")}}
BOUNDED = False


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.p0 = nn.Parameter(torch.randn(33, 5))
        self.m1 = nn.Linear(5, 6, bias=False)

    def forward(self, x0):
        v0 = torch.matmul(x0, self.p0) + 0.5
        return self.m1(F.gelu(torch.sinc(v0), approximate="tanh"))


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed, s0=4):
    torch.manual_seed(seed)
    x0 = torch.randn(s0, 4, 33) * 4.5e02
    return (x0,), {}
