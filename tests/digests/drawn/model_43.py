"""Model 43 of the search: onnx, int8."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "onnx", "int8", True
SIZES = [{"s0": 4, "s1": 8}, {"s0": 12, "s1": 1}, {"s0": 16, "s1": 3}, {"s0": 2, "s1": 16}]
DYNAMIC = {
    "x0": {0: Dim("s0", min=2, max=20), 2: Dim("s1", min=1, max=16), 3: Dim("s1", min=1, max=16)}
}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.p0 = nn.Parameter(torch.randn(17, 6))
        self.m1 = nn.Linear(6, 4)

    def forward(self, x0):
        v0 = torch.movedim(x0, 1, 3)
        v1 = torch.div(v0, v0 + 9.5, rounding_mode="floor")
        v2 = torch.tensordot(v1, self.p0, dims=1)
        v3 = self.m1(v2)
        return {"a": v3, "b": v0}


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed, s0=4, s1=8):
    torch.manual_seed(seed)
    x0 = torch.randn(s0, 17, s1, s1) * 1.7e-02
    return (x0,), {}
