"""Model 21 of the search: xnnpack, int8."""

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
        self.m0 = nn.Linear(3, 1, bias=False)
        self.m0.weight.data.view(-1)[0] = 20.0

    def forward(self, x1):
        v0 = self.m0(x1)
        return (v0, v0)


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed):
    torch.manual_seed(seed)
    x1 = torch.randn(3)
    return (x1,), {}
