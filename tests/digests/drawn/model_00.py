"""Model 0 of the search: xnnpack, int8."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "xnnpack", "int8", True
SIZES = [{}]
DYNAMIC = None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("c0", torch.randn(1, 5))
        self.m1 = nn.Linear(5, 3)

    def forward(self, x0):
        v1 = x0 + self.c0
        v2 = self.m1(v1)
        return v2


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed):
    torch.manual_seed(seed)
    x0 = torch.randn(2, 32, 1, 5)
    return (x0,), {}
