"""Model 27 of the search: xnnpack, int8."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "xnnpack", "int8", True
SIZES = [{}]
DYNAMIC = None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m2 = nn.Conv2d(48, 1, 1)
        self.m3 = nn.Conv2d(1, 48, 1)
        self.m4 = nn.Conv3d(2, 1, 5, padding=2)

    def forward(self, x0):
        v1 = x0 * F.hardsigmoid(self.m3(F.relu(self.m2(x0.mean((2, 3), keepdim=True)))))
        v2 = self.m4(v1)
        v3 = torch.split(v2, 2, 2)[-1]
        return v3


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed):
    torch.manual_seed(seed)
    x0 = torch.rand(2, 48, 14, 10).flip(0)
    return (), {"x0": x0}
