"""A counter beside calls that are left out, of other ranks: onnx, int8."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "onnx", "int8", True
SIZES = [{"s0": 4}, {"s0": 1}]
DYNAMIC = {"x1": {0: Dim("s0", max=8)}}
BOUNDED = False


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("b1", torch.zeros(1, dtype=torch.int64))

    def forward(self, x1):
        v6 = x1.squeeze()
        self.b1.add_(1)
        v8 = v6 * self.b1
        return v8


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed, s0=4):
    torch.manual_seed(seed)
    x1 = torch.randn(s0, 7, 3, 3) * 1.7e-06
    return (x1,), {}
