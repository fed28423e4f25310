"""Every other pixel: xnnpack, int8."""

import torch
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "xnnpack", "int8", True
SIZES = [{"s0": 4}, {"s0": 2}, {"s0": 8}]
DYNAMIC = {"x0": {2: 2 * Dim("s0", min=2, max=8)}}
BOUNDED = False


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m0 = nn.Conv2d(4, 6, 1)

    def forward(self, x0):
        return self.m0(x0[:, :, ::2] + x0[:, :, 1::2])


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed, s0=4):
    torch.manual_seed(seed)
    x0 = torch.randn(1, 4, 2 * s0, 5)
    return (x0,), {}
