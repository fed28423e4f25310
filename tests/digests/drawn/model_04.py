"""Model 4 of the search: onnx, a8w4."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "onnx", "a8w4", True
SIZES = [{}]
DYNAMIC = None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m1 = nn.Linear(14, 17)
        self.m1.weight.data.view(-1)[0] = 20.0

    def forward(self, x2):
        v2 = self.m1(x2)
        return v2


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed):
    torch.manual_seed(seed)
    x2 = torch.randn(5, 4, 1, 14) + 100.0
    return (), {"x2": x2}
