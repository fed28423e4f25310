"""Model 22 of the search: onnx, a8w4."""

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
        self.m3 = nn.Conv2d(3, 30, 1, padding=1, groups=3)
        self.m4 = nn.Linear(7, 8)
        self.m4.weight.data.view(-1)[0] = 20.0

    def forward(self, x0):
        v4 = self.m3(x0)
        v5 = self.m4(v4)
        v7 = v5.tril()
        return v7


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed):
    torch.manual_seed(seed)
    x0 = torch.rand(2, 3, 1, 5)
    return (x0,), {}
