"""Model 20 of the search: cpu, int8."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "cpu", "int8", True
SIZES = [{}]
DYNAMIC = None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m0 = nn.Conv1d(1, 1, 7, stride=2, padding=3, bias=False)
        self.p1 = nn.Parameter(torch.randn(1, 8))
        self.p2 = nn.Parameter(torch.randn(1, 8))
        self.m3 = nn.Linear(10, 17)

    def forward(self, x1):
        x1 = x1[0]
        v1 = self.m0(x1)
        v4 = torch.mm(v1, self.p1)
        v5 = v4 + self.p2
        v6 = F.pad(v5, (1, 1, 1, 1))
        v7 = self.m3(v6)
        return v7


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed):
    torch.manual_seed(seed)
    x1 = torch.rand(1, 1)
    return (), {"x1": (x1,)}
