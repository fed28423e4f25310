"""Model 33 of the search: xnnpack, int8."""

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
        self.m0 = nn.Linear(1, 3)
        self.m0.weight.data.view(-1)[0] = 20.0
        self.m1 = nn.Linear(3, 8)

    def forward(self, x1):
        v0 = x1 - 0.5
        v1 = F.hardsigmoid(v0)
        v2 = v1[..., :1]
        v3 = v2.clamp(min=-0.5)
        v5 = self.m0(v3)
        v6 = torch.maximum(v5, v5)
        v7 = self.m1(v6)
        return (v7, None)


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed):
    torch.manual_seed(seed)
    x1 = torch.rand(20) * 1.5e02
    return (x1,), {}
