"""Functions that ExecuTorch has no kernel for: xnnpack, int8."""

import torch
import torch.nn.functional as F
from torch import nn

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
        v1 = F.rrelu(v0)
        v2 = torch.hypot(v0, v1)
        return torch.copysign(v2, v0)


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed):
    torch.manual_seed(seed)
    x0 = torch.randn(2, 4)
    return (x0,), {}
