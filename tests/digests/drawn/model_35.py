"""Model 35 of the search: cpu, int8_dynamic."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "cpu", "int8_dynamic", True
SIZES = [{}]
DYNAMIC = None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m0 = nn.Linear(17, 12)

    def forward(self, x0):
        v0 = torch.erf(x0)
        v2 = self.m0(v0)
        return v2


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed):
    torch.manual_seed(seed)
    x0 = torch.randn(17) + 100.0
    return (x0,), {}
