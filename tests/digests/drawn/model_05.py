"""Model 5 of the search: cpu, w8."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "cpu", "w8", True
SIZES = [{}]
DYNAMIC = None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m0 = nn.Linear(4, 2)
        self.m0.weight.data.abs_()
        self.m1 = nn.Linear(1, 6)
        self.m1.weight.data.zero_()
        self.m3 = nn.Linear(6, 33)
        self.m4 = nn.Linear(33, 17)

    def forward(self, x0):
        v0 = self.m0(x0)
        v1 = torch.movedim(v0, 0, 4)
        v2 = self.m1(v1)
        v5 = v2 // 0.25
        v6 = self.m3(v5)
        v7 = torch.ceil(v6)
        v9 = self.m4(v7)
        return v9


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed):
    torch.manual_seed(seed)
    x0 = torch.randn(1, 1, 4, 3, 4)
    return (x0,), {}
