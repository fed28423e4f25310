"""float_power in a float64 model: onnx, lut4."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "onnx", "int8", True
SIZES = [{}]
DYNAMIC = None
BOUNDED = False


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m0 = nn.Conv2d(4, 2, 3, bias=False)

    def forward(self, x0):
        v2 = torch.float_power(x0.abs() + 0.1, 1) + x0
        v3 = self.m0(v2)
        return v3


def model():
    torch.manual_seed(0)
    return Model().eval().to(torch.float64)


def batch(seed):
    torch.manual_seed(seed)
    x0 = torch.randn(4, 3, 4)
    return (x0,), {}
