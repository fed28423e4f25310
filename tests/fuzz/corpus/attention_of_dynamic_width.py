"""Attention of three dimensions and a dynamic width: onnx, int8."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "onnx", "int8", True
SIZES = [{"s1": 5}, {"s1": 16}, {"s1": 8}]
DYNAMIC = {"x0": {1: Dim.AUTO}}
BOUNDED = False


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m1 = nn.Conv2d(1, 4, 2, padding=1)

    def forward(self, x0):
        v2 = x0.transpose(1, 2)
        v9 = F.scaled_dot_product_attention(v2, v2, v2)
        v12 = self.m1(v9)
        return v12


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed, s1=5):
    torch.manual_seed(seed)
    x0 = torch.randn(1, s1, 10)
    return (x0,), {}
