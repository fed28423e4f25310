"""A window made in forward: onnx, int8_dynamic."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "onnx", "int8_dynamic", True
SIZES = [{"s0": 6}, {"s0": 16}, {"s0": 2}, {"s0": 5}]
DYNAMIC = {"x1": {"a": {0: Dim("s0", min=2, max=64)}}}
BOUNDED = False


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m3 = nn.BatchNorm1d(7, affine=False)
        self.m3.running_mean.normal_()
        self.m3.running_var.uniform_(0.1, 2.0)
        self.m4 = nn.Linear(4, 4)

    def forward(self, x1):
        x1 = x1["a"]
        v0 = (x1.to(torch.float64) * 2).to(torch.float32)
        v3 = v0.unfold(-1, 4, 2) * torch.hamming_window(4).to(v0)
        v5 = self.m3(v3)
        v6 = torch.zeros_like(v3).index_add(2, torch.tensor([0]), v3.narrow(2, 0, 1))
        v7 = self.m4(v6)
        return (v5, v7)


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed, s0=6):
    torch.manual_seed(seed)
    x1 = torch.randn(s0, 16) * 4.6e-01
    return ({"a": x1},), {}
