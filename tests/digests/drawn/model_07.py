"""Model 7 of the search: onnx, w3."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "onnx", "w3", True
SIZES = [{"s0": 2}, {"s0": 8}, {"s0": 6}, {"s0": 2}]
DYNAMIC = {"x0": {0: Dim("s0", min=2, max=8)}}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m0 = nn.Linear(14, 7)
        self.m0.weight.data.view(-1)[0] = 20.0
        self.m1 = nn.ConvTranspose2d(12, 3, 4, stride=2, padding=1, groups=3)
        self.m1.weight.data.zero_()

    def forward(self, x0):
        v1 = F.gelu(x0)
        v2 = self.m0(v1)
        v6 = v2.cumsum(2)
        v7 = self.m1(v6)
        return v7


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed, s0=2):
    torch.manual_seed(seed)
    x0 = torch.randn(s0, 12, 7, 14)
    return (), {"x0": x0}
