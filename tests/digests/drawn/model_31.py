"""Model 31 of the search: onnx, w4."""

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
        self.m1 = nn.PReLU(6)
        self.register_buffer("c6", torch.randn(1))
        self.register_buffer("b8", torch.zeros((4, 6), dtype=torch.float32))
        self.m9 = nn.Linear(6, 8, bias=False)

    def forward(self, x0):
        v2 = self.m1(x0)
        v4 = v2 - self.c6
        v6 = self.b8 + v4
        self.b8.add_(v4)
        v11 = self.m9(v6)
        return {"a": v11, "b": v11}


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed):
    torch.manual_seed(seed)
    x0 = torch.rand(4, 6)
    return (x0,), {}
