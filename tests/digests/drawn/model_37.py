"""Model 37 of the search: onnx, a8w4."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "onnx", "a8w4", True
SIZES = [{}]
DYNAMIC = None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m1 = nn.PReLU(1)

    def forward(self, x0):
        v7 = F.pad(x0, (1, 2))
        v10 = self.m1(v7)
        v11 = torch.tanh(v10)
        return v11


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed):
    torch.manual_seed(seed)
    x0 = torch.randn(1, 33)
    return (), {"x0": x0}
