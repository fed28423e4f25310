"""Model 30 of the search: xnnpack, int8_dynamic."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "xnnpack", "int8_dynamic", True
SIZES = [{"s1": 3}, {"s1": 1}, {"s1": 3}, {"s1": 9}]
DYNAMIC = {"x1": {3: Dim("s1")}}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m0 = nn.Linear(2, 7)
        self.m1 = nn.Linear(7, 17)
        self.m2 = nn.Linear(7, 17)

    def forward(self, x1):
        v0 = x1.permute(2, 3, 1, 0)
        v1 = self.m0(v0)
        v2 = F.silu(self.m1(v1)) * self.m2(v1)
        v3 = v2[torch.tensor([0, -1])]
        v5 = v3.clamp(min=-0.5)
        return [v5, (v2,)]


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed, s1=3):
    torch.manual_seed(seed)
    x1 = torch.randn(2, 8, 14, s1)
    return (x1,), {}
