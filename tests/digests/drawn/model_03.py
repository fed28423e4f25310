"""Model 3 of the search: xnnpack, a8w4_g32."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "xnnpack", "a8w4_g32", True
SIZES = [{"s0": 2}, {"s0": 1}, {"s0": 9}, {"s0": 6}]
DYNAMIC = {"x0": {0: Dim("s0")}}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m0 = nn.Embedding(50, 5)
        self.m0.weight.data.zero_()
        self.m1 = nn.Linear(5, 17)
        self.m2 = nn.Linear(17, 5)
        self.m3 = nn.LayerNorm(5)
        self.m6 = nn.Embedding(11, 13)

    def forward(self, x0):
        v0 = self.m0(x0)
        v1 = v0 + self.m2(F.gelu(self.m1(self.m3(v0))))
        v2 = v1.clone()
        v2.relu_()
        v7 = x0 // 2
        v9 = self.m6(v7.clamp(0, 10))
        v11 = F.hardshrink(v9)
        return [v11, (v2,)]


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed, s0=2):
    torch.manual_seed(seed)
    x0 = torch.randint(
        0,
        11,
        (
            s0,
            17,
        ),
    )
    return (x0,), {}
