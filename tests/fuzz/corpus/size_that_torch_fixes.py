"""The last chunk of a dynamic batch: onnx, int8."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "onnx", "int8", True
SIZES = [{"s0": 3}, {"s0": 9}, {"s0": 1}]
DYNAMIC = {"x0": {0: Dim.AUTO}}
BOUNDED = False


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m0 = nn.MultiheadAttention(12, 2, batch_first=True)

    def forward(self, x0):
        v1 = x0.chunk(2, 0)[-1]
        v4 = self.m0(v1, v1, v1, need_weights=False)[0]
        return (v4, x0)


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed, s0=3):
    torch.manual_seed(seed)
    x0 = torch.randn(s0, 20, 12)
    return (x0,), {}
