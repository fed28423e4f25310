"""Model 12 of the search: xnnpack, int8_minmax."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "xnnpack", "int8_minmax", True
SIZES = [{}]
DYNAMIC = None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m0 = nn.Linear(1, 1)
        self.m1 = nn.Linear(1, 1)
        self.m2 = nn.LayerNorm(1)

    def forward(self, x0):
        v0 = x0 + self.m1(F.gelu(self.m0(self.m2(x0))))
        v2 = F.gelu(v0, approximate="tanh")
        v4 = F.adaptive_avg_pool2d(v2, 1)
        return v4


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed):
    torch.manual_seed(seed)
    x0 = (torch.randn(5, 5, 8, 1) * 4.0e05).flip(0)
    return (), {"x0": x0}
