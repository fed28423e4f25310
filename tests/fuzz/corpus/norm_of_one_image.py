"""Batch norm behind a convolution without a batch dimension: cpu, int8."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "cpu", "int8", True
SIZES = [{}]
DYNAMIC = None
BOUNDED = False


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m0 = nn.Conv1d(2, 16, 5, stride=2, padding=1)
        self.m1 = nn.BatchNorm1d(7)
        self.m1.running_mean.normal_()

    def forward(self, x0):
        v0 = self.m0(x0)
        v1 = self.m1(v0)
        return v1


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed):
    torch.manual_seed(seed)
    x0 = torch.randn(2, 16)
    return (x0,), {}
