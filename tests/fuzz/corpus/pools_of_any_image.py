"""Pools of images of any size: onnx, int8."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "onnx", "int8", True
SIZES = [{"s0": 12}, {"s0": 6}, {"s0": 17}]
DYNAMIC = {"x0": {2: Dim("s0", min=6, max=20), 3: Dim("s1", min=6, max=20)}}
BOUNDED = False


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m0 = nn.Conv2d(4, 4, 3, padding=1)
        self.m1 = nn.Conv2d(4, 3, 1)

    def forward(self, x0):
        v0 = F.relu(self.m0(x0))
        v1 = F.interpolate(self.m1(F.adaptive_avg_pool2d(v0, 3)), size=x0.shape[2:])
        return v1, F.adaptive_avg_pool2d(v0, (x0.shape[2] // 2, 2))


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed, s0=12):
    torch.manual_seed(seed)
    x0 = torch.randn(2, 4, s0, s0 + 1)
    return (x0,), {}
