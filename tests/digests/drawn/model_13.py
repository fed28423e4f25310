"""Model 13 of the search: onnx, nf4."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "onnx", "nf4", False
SIZES = [{}]
DYNAMIC = None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m0 = nn.Conv2d(33, 33, 3, padding=1, groups=33)
        self.m1 = nn.BatchNorm2d(33)
        self.m1.running_mean.normal_()
        self.m1.running_var.uniform_(0.2, 2.0)

    def forward(self, x0):
        x0 = x0[0]
        v0 = F.hardswish(self.m1(self.m0(x0)))
        return {"a": v0, "b": v0}


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed):
    torch.manual_seed(seed)
    x0 = torch.randn(2, 33, 6, 10)
    return (), {"x0": (x0,)}
