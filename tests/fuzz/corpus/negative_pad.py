"""Negative pad: xnnpack, int8."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "xnnpack", "int8", True
SIZES = [{}]
DYNAMIC = None
BOUNDED = False


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m0 = nn.Linear(4, 8)

    def forward(self, x0):
        v0 = self.m0(x0)
        v1 = F.pad(v0, (1, -1))
        return v1


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed):
    torch.manual_seed(seed)
    x0 = torch.randn(2, 4)
    return (x0,), {}
