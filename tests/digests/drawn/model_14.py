"""Model 14 of the search: cpu, int8."""

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
        self.m0 = nn.Conv1d(6, 8, 5, groups=2)

    def forward(self, x0):
        v0 = x0.std(-1)
        v1 = self.m0(v0)
        return v1


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed):
    torch.manual_seed(seed)
    x0 = torch.rand(1, 6, 5, 8)
    return (x0,), {}
