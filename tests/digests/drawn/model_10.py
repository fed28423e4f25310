"""Model 10 of the search: onnx, int8_dynamic_per_tensor."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "onnx", "int8_dynamic_per_tensor", True
SIZES = [{"s0": 5}, {"s0": 12}, {"s0": 16}, {"s0": 2}]
DYNAMIC = {"x0": {0: Dim("s0", max=20)}}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m0 = nn.BatchNorm1d(12)
        self.m0.running_mean.normal_()
        self.m0.running_var.uniform_(0.1, 2.0)

    def forward(self, x0):
        v1 = x0.mT
        v2 = self.m0(v1)
        return v2


def model():
    torch.manual_seed(0)
    return Model().eval().to(torch.float16)


def batch(seed, s0=5):
    torch.manual_seed(seed)
    x0 = (torch.randn(s0, 12, 12) * 4.4e-05).to(torch.float16)
    return (x0,), {}
