"""Filters of each image: onnx, int8."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "onnx", "int8", True
SIZES = [{"s0": 2}, {"s0": 1}, {"s0": 5}]
DYNAMIC = {"x0": {0: Dim("s0", max=8)}}
BOUNDED = False


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m0 = nn.Linear(4, 3)
        self.m1 = nn.Conv2d(6, 4, 1)
        self.p0 = nn.Parameter(torch.randn(3, 6, 4, 3, 3) * 0.2)

    def forward(self, x0):
        b, c, h, w = x0.shape
        shares = self.m0(x0.mean((2, 3))).sigmoid()
        filters = (shares @ self.p0.view(3, -1)).view(b * 6, 4, 3, 3)
        v0 = F.conv2d(x0.reshape(1, b * c, h, w), filters, padding=1, groups=b).view(b, 6, h, w)
        return self.m1(F.relu(v0))


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed, s0=2):
    torch.manual_seed(seed)
    x0 = torch.randn(s0, 4, 7, 6)
    return (x0,), {}
