"""A small model, quantized, for the tests of the analysis."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.export import export

import pt2e_quant as pq


class Residual(nn.Module):
    """Convolutions with batch norms, a depthwise one, an add in place, a norm, a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 2)
        self.wide = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(16)
        self.deep = nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False)
        self.second_norm = nn.BatchNorm2d(16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.silu(self.stem(x))
        y = nn.functional.relu6(self.first_norm(self.wide(x)), inplace=True)
        y = self.second_norm(self.deep(y))
        y += x
        return self.head(self.norm(torch.relu(y).mean((2, 3))))


@pytest.fixture(scope="package")
def made():
    """(module, program, prepared graph, q/dq graph, batches)."""
    torch.manual_seed(0)
    model = Residual().eval()
    for norm in (model.first_norm, model.second_norm):
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    batches = [torch.randn(4, 3, 24, 24) for _ in range(2)]
    program = export(model, (batches[0],))
    prepared = pq.prepare(program, pq.backends.get("xnnpack").quantizer("int8_minmax"))
    pq.calibrate(prepared, batches, progress=False)
    return model, program, copy.deepcopy(prepared), pq.convert(prepared), batches
