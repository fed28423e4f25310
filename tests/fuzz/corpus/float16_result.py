"""Float16 result: cpu, int8."""

import torch
from torch import nn

BACKEND, RECIPE, STRICT = "cpu", "int8", True
SIZES = [{}]
DYNAMIC = None
BOUNDED = False


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m0 = nn.Linear(33, 16)

    def forward(self, x0):
        v0 = self.m0(x0)
        return v0


def model():
    torch.manual_seed(0)
    return Model().eval().to(torch.float16)


def batch(seed):
    torch.manual_seed(seed)
    x0 = torch.rand(3, 12, 33).to(torch.float16)
    return (x0,), {}
