"""Float64 table of codes: onnx, nf4."""

import torch
import torch.nn.functional as F
from torch import nn

BACKEND, RECIPE, STRICT = "onnx", "nf4", True
SIZES = [{}]
DYNAMIC = None
BOUNDED = False


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m0 = nn.Conv2d(4, 2, 1)

    def forward(self, x0):
        v0 = F.relu(self.m0(x0))
        return v0


def model():
    torch.manual_seed(0)
    return Model().eval().to(torch.float64)


def batch(seed):
    torch.manual_seed(seed)
    x0 = torch.randn(2, 4, 8, 6).to(torch.float64)
    return (x0,), {}
