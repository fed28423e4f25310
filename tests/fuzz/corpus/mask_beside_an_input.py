"""A mask of infinities beside an input: onnx, int8."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "onnx", "int8", True
SIZES = [{}]
DYNAMIC = None
BOUNDED = False


class Model(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x1):
        v0 = torch.softmax(
            x1 + torch.triu(torch.full((x1.shape[-1], x1.shape[-1]), float("-inf")), 1), -1
        )
        return v0


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed):
    torch.manual_seed(seed)
    x1 = torch.randn(1, 1, 1, 6)
    return (x1,), {}
