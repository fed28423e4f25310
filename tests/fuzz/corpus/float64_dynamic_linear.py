"""Float64 dynamic linear: xnnpack, int8_dynamic."""

import torch
from torch import nn

BACKEND, RECIPE, STRICT = "xnnpack", "int8_dynamic", True
SIZES = [{}]
DYNAMIC = None
BOUNDED = False


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m0 = nn.Linear(10, 8)

    def forward(self, x0):
        v0 = torch.erf(x0)
        v1 = self.m0(v0)
        return v1


def model():
    torch.manual_seed(0)
    return Model().eval().to(torch.float64)


def batch(seed):
    torch.manual_seed(seed)
    x0 = torch.randn(4, 1, 10).to(torch.float64)
    return (x0,), {}
