"""Embedding in a new process: xnnpack, int8."""

import torch
from torch import nn

BACKEND, RECIPE, STRICT = "xnnpack", "int8", True
SIZES = [{}]
DYNAMIC = None
BOUNDED = False


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m0 = nn.Embedding(50, 24)
        self.m1 = nn.Conv1d(3, 4, 1, stride=2)

    def forward(self, x0):
        x0 = x0["a"]
        v0 = self.m0(x0.clamp(0, 49))
        v1 = self.m1(v0)
        return v1


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed):
    torch.manual_seed(seed)
    x0 = torch.randint(0, 11, (1, 3))
    return ({"a": x0},), {}
