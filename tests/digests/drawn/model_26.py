"""Model 26 of the search: cpu, int8_reduced."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BACKEND, RECIPE, STRICT = "cpu", "int8_reduced", True
SIZES = [{}]
DYNAMIC = None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.p0 = nn.Parameter(torch.randn(48, 24))
        self.m2 = nn.Conv1d(2, 2, 2)

    def forward(self, x0):
        v0 = x0 * torch.ones(x0.shape[-2], x0.shape[-1]).tril().bool()
        v1 = torch.einsum("...k,kn->...n", v0, self.p0)
        v3 = self.m2(v1)
        return v3


def model():
    torch.manual_seed(0)
    return Model().eval()


def batch(seed):
    torch.manual_seed(seed)
    x0 = torch.cat([(torch.randn(2, 48) + 5.0), (torch.randn(2, 48) + 5.0)], -1)[..., ::2]
    return (), {"x0": x0}
