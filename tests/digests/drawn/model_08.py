"""Model 8 of the search: cpu, int8_full."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "cpu", "int8_full", True
SIZES = [{}]
DYNAMIC = None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m2 = nn.Linear(4, 4)
        self.m4 = nn.InstanceNorm2d(4, affine=False)
        self.m5 = nn.Conv3d(
            4, 4, 2, padding=1, dilation=2, groups=4, bias=False, padding_mode="circular"
        )
        self.m5.weight.data.abs_()
        self.m7 = nn.Linear(4, 4)
        self.m10 = nn.BatchNorm1d(4, affine=False)
        self.m10.running_mean.normal_()
        self.m10.running_var.uniform_(0.1, 2.0)
        self.m12 = nn.Linear(4, 4)

    def forward(self, x0):
        v3 = self.m2(x0)
        v4 = v3[..., None]
        v5 = self.m4(v4)
        v6 = self.m5(v5)
        v8 = v6.mean(3)
        v9 = self.m10(v8)
        v12 = self.m7(v9)
        v13 = self.m12(v12)
        return (v13, x0)


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed):
    torch.manual_seed(seed)
    x0 = torch.randn(4, 4, 4) + -3.0
    return (x0,), {}
