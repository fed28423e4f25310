"""Model 17 of the search: cpu, int8."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "cpu", "int8", True
SIZES = [{"s0": 8}, {"s0": 2}, {"s0": 3}, {"s0": 9}]
DYNAMIC = {"x0": {0: Dim("s0", max=9)}}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m0 = nn.BatchNorm1d(7, affine=False)
        self.m0.running_mean.normal_()
        self.m0.running_var.uniform_(0.1, 2.0)
        self.m1 = nn.Linear(7, 13)
        self.m2 = nn.PReLU(13)
        self.p5 = nn.Parameter(torch.zeros(1))

    def forward(self, x0):
        v1 = self.m0(x0)
        v5 = self.m1(v1)
        v7 = v5.to(torch.float64).to(torch.float32)
        v8 = v7[torch.tensor([0, -1])]
        v9 = self.m2(v8)
        v11 = v9 * self.p5
        return v11


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed, s0=8):
    torch.manual_seed(seed)
    x0 = torch.rand(s0, 7).flip(0)
    return (), {"x0": x0}
