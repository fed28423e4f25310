"""Written input: onnx, int8."""

import torch
from torch import nn

BACKEND, RECIPE, STRICT = "onnx", "int8", True
SIZES = [{}]
DYNAMIC = None
BOUNDED = False


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m0 = nn.Linear(4, 8)

    def forward(self, x0):
        v0 = self.m0(x0)
        x0.add_(1.0)
        v2 = x0 * 1.5
        return (v0, v2)


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed):
    torch.manual_seed(seed)
    x0 = torch.randn(3, 4)
    return (x0,), {}
