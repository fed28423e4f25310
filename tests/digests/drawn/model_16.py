"""Model 16 of the search: onnx, w8."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "onnx", "w8", True
SIZES = [{"s0": 2, "s1": 3}, {"s0": 16, "s1": 1}, {"s0": 1, "s1": 13}, {"s0": 11, "s1": 16}]
DYNAMIC = {
    "x0": ({0: Dim("s0", min=1, max=64), 2: Dim("s1", min=1, max=16), 4: Dim("s1", min=1, max=16)},)
}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m0 = nn.ConvTranspose3d(4, 20, 3, padding=1, groups=4)
        self.m1 = nn.BatchNorm3d(20, affine=False)
        self.m1.running_mean.normal_()
        self.m1.running_var.uniform_(0.1, 2.0)

    def forward(self, x0):
        x0 = x0[0]
        v0 = x0.max()
        v2 = self.m0(x0)
        v4 = (v0 >= 0).logical_not()
        v6 = self.m1(v2)
        v8 = v6.to(torch.bfloat16).to(torch.float32)
        v13 = F.relu(v8)
        return [v13, (v4,)]


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed, s0=2, s1=3):
    torch.manual_seed(seed)
    x0 = torch.randn(s0, 4, s1, 2, s1)
    return ((x0,),), {}
