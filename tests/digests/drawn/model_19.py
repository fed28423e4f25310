"""Model 19 of the search: onnx, int8."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "onnx", "int8", True
SIZES = [{}]
DYNAMIC = None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m0 = nn.Linear(2, 48)

    def forward(self, x1):
        v2 = torch.softmax(x1, 0)
        v3 = torch.sinc(v2)
        v4 = torch.stack([v2, v3], 0)
        v5 = torch.softmax(v4, -1)
        v6 = v4 + v5
        v7 = torch.trunc(v6)
        v8 = v7.sum(1)
        v9 = v8.clone()
        v9.masked_fill_(v8 > 0.5, 0.0)
        v11 = v9 + v8
        v12 = v11.roll(2, 0)
        v14 = self.m0(v12)
        return v14


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed):
    torch.manual_seed(seed)
    x1 = torch.randn(0)
    return (x1,), {}
