"""A float64 value that meets float32 ones: onnx, int8."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "onnx", "int8", False
SIZES = [{}]
DYNAMIC = None
BOUNDED = False


class Model(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x0):
        v3 = torch.float_power(x0.abs() + 0.1, 1) + x0
        v5 = F.relu(v3)
        return v5


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed):
    torch.manual_seed(seed)
    x0 = torch.randn(1, 1, 1, 3)
    return (x0,), {}
