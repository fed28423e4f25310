"""A view of fixed shape with a dynamic stride: xnnpack, int8."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "xnnpack", "int8", True
SIZES = [{"s1": 4}, {"s1": 1}, {"s1": 9}]
DYNAMIC = {"x0": {3: Dim("s1", min=1, max=9)}}
BOUNDED = True


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m0 = nn.Conv2d(8, 3, 1)

    def forward(self, x0):
        v0 = torch.movedim(F.relu(x0)[..., :1], 1, 3)
        v1 = self.m0(v0)
        return v1


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed, s1=4):
    torch.manual_seed(seed)
    x0 = torch.randn(2, 17, 8, s1)
    return (x0,), {}
