"""An input written by an operator that is quantized: xnnpack, int8."""

import torch
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
        x0.mul_(2.0)
        return self.m0(x0)


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed):
    torch.manual_seed(seed)
    x0 = torch.randn(2, 4)
    return (x0,), {}
