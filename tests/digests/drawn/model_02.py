"""Model 2 of the search: cpu, int8."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "cpu", "int8", True
SIZES = [{}]
DYNAMIC = None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.p0 = nn.Parameter(torch.randn(1, 16))
        self.p1 = nn.Parameter(torch.randn(16, 16))
        self.m2 = nn.Conv2d(13, 13, 3, padding=1, groups=1)
        self.m3 = nn.BatchNorm2d(13)
        self.m3.running_mean.normal_()
        self.m3.running_var.uniform_(0.2, 2.0)

    def forward(self, x0):
        v0 = F.linear(x0, self.p0.t())
        v2 = torch.cat([v0, v0], 2)
        v4 = torch.matmul(v2, self.p1) + 0.5
        v5 = F.hardswish(v4)
        v6 = F.silu(self.m3(self.m2(v5)))
        v7 = F.lp_pool2d(v6, 2, 2)
        return v7


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed):
    torch.manual_seed(seed)
    x0 = torch.randn(3, 13, 10, 1)
    return (x0,), {}
