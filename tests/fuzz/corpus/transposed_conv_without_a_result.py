"""A size at which a transposed convolution gives nothing: onnx, int8."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "onnx", "int8", True
SIZES = [{"s1": 3}, {"s1": 1}]
DYNAMIC = {"x0": {4: Dim("s1", min=1, max=8)}}
BOUNDED = False


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m0 = nn.ConvTranspose3d(4, 4, 2, stride=2, padding=1)

    def forward(self, x0):
        v2 = self.m0(x0)
        return v2


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed, s1=3):
    torch.manual_seed(seed)
    x0 = torch.rand(2, 4, 4, 3, s1)
    return (x0,), {}
