"""A floor behind activations that the kernel rounds in its own blocks: onnx, a8w4."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "onnx", "a8w4", True
SIZES = [{"s0": 5}, {"s0": 1}, {"s0": 6}, {"s0": 9}]
DYNAMIC = {"x1": {"a": {0: Dim("s0", min=1, max=9)}}}
BOUNDED = False


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m0 = nn.Linear(5, 17, bias=False)

    def forward(self, x1):
        x1 = x1["a"]
        v0 = torch.tanh(x1)
        v1 = F.interpolate(x1, size=7, mode="linear")
        v2 = self.m0(v0)
        v3 = v1[:, :, 6:]
        v6 = torch.div(v2, v3 + 9.5, rounding_mode="floor")
        v7 = torch.acos(v6.clamp(-0.9, 0.9))
        return v7, v7


def model():
    torch.manual_seed(0)
    return Model().eval().to(torch.float16)


def batch(seed, s0=5):
    torch.manual_seed(seed)
    x1 = torch.rand(s0, 12, 5).to(torch.float16)
    return ({"a": x1},), {}
