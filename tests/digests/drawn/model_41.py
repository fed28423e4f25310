"""Model 41 of the search: cpu, int8_bf16."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "cpu", "int8_bf16", True
SIZES = [{"s0": 8}, {"s0": 3}, {"s0": 1}, {"s0": 16}]
DYNAMIC = {"x2": {0: Dim("s0", min=1, max=20)}}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m3 = nn.BatchNorm1d(17, affine=False)
        self.m3.running_mean.normal_()
        self.m3.running_var.uniform_(0.1, 2.0)
        self.m4 = nn.Linear(17, 24)

    def forward(self, x2):
        v1 = self.m3(x2)
        v2 = self.m4(v1)
        v3 = v2.repeat_interleave(2, 1)
        return {"a": v3, "b": v2}


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed, s0=8):
    torch.manual_seed(seed)
    x2 = torch.randn(s0, 17).index_fill(-1, torch.tensor([0]), 0.0)
    return (x2,), {}
