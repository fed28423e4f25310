"""Model 25 of the search: onnx, w4."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "onnx", "w4", True
SIZES = [{}]
DYNAMIC = None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m0 = nn.Linear(6, 2)
        self.m1 = nn.Linear(6, 2)
        self.m2 = nn.BatchNorm2d(3)
        self.m2.running_mean.normal_()
        self.m2.running_var.uniform_(0.1, 2.0)
        self.m2.weight.data[0] = 1e-6

    def forward(self, x0):
        v0 = torch.sinh(x0)
        v1 = torch.sigmoid(self.m0(v0)) * self.m1(v0)
        v2 = self.m2(v1)
        v3 = v2.median(2).values
        v4 = v3 + 1.0
        v5 = torch.baddbmm(v4.mean((1, 2), keepdim=True), v4, v4.transpose(-1, -2), beta=0.5)
        return (v5, None)


def model():
    torch.manual_seed(0)
    return Model().eval().to(torch.float64)


def batch(seed):
    torch.manual_seed(seed)
    x0 = torch.randn(5, 3, 8, 6).to(torch.float64)
    return (x0,), {}
