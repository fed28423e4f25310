"""A linear added to itself: cpu, a8w4."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "cpu", "a8w4", True
SIZES = [{}]
DYNAMIC = None
BOUNDED = False


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m0 = nn.Linear(8, 8)

    def forward(self, x0):
        v0 = self.m0(x0)
        v1 = v0 + v0
        return v1


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed):
    torch.manual_seed(seed)
    x0 = torch.randn(4, 8)
    return (x0,), {}
