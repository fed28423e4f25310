"""Dead layer of large inputs: xnnpack, int8."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "xnnpack", "int8", True
SIZES = [{}]
DYNAMIC = None
BOUNDED = False


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m0 = nn.Linear(1, 4, bias=False)
        self.m0.weight.data.zero_()

    def forward(self, x0):
        v0 = self.m0(x0 * 1.0)
        return v0


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed):
    torch.manual_seed(seed)
    x0 = torch.randn(5, 1) * 4.0e05
    return (x0,), {}
