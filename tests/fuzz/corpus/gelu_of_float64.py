"""Functions that ONNX Runtime has in float alone, of float64: onnx, int8."""

import torch
import torch.nn.functional as F
from torch import nn

BACKEND, RECIPE, STRICT = "onnx", "int8", True
SIZES = [{}]
DYNAMIC = None
BOUNDED = False


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m0 = nn.Linear(6, 8)
        self.m1 = nn.Linear(8, 4)

    def forward(self, x0):
        v0 = F.gelu(self.m0(x0).double())
        return self.m1(F.mish(v0).float()), F.elu(v0)


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed):
    torch.manual_seed(seed)
    x0 = torch.randn(4, 6)
    return (x0,), {}
