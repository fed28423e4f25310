"""The inputs of a cat get its result's dtype; those of one dtype stay."""

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.passes.cleanup.join_and_split import promote_cats


class Joined(nn.Module):
    def __init__(self, join):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.join = join

    def forward(self, x):
        y = self.linear(x)
        return self.join([y, x.double(), y])


JOINS = {
    "cat": lambda parts: torch.cat(parts, 1),
    "stack": lambda parts: torch.stack(parts),
    "hstack": torch.hstack,
    "column_stack": torch.column_stack,
}


@pytest.mark.parametrize("name", JOINS)
def test_cat_when_dtypes_differ_then_inputs_are_cast(name):
    x = torch.randn(3, 4)
    model = Joined(JOINS[name])
    gm = torch.export.export(model, (x,)).module(check_guards=False)
    assert promote_cats(gm).changed
    torch.testing.assert_close(gm(x), model(x), rtol=0, atol=0)
    assert not promote_cats(gm).changed


@pytest.mark.parametrize("backend", ["onnx", "xnnpack", "cpu"])
def test_cat_when_dtypes_differ_then_every_backend_runs_it(backend):
    pytest.importorskip({"onnx": "onnxruntime", "xnnpack": "executorch", "cpu": "torch"}[backend])
    torch.manual_seed(0)
    x = torch.randn(3, 4)
    model = Joined(JOINS["hstack"])
    artifact = pq.quantize(model, (x,), calibration_data=[(x,)], backend=backend, progress=False)
    assert artifact.run(x).dtype == torch.float64
    torch.testing.assert_close(artifact.run(x), model(x), rtol=0, atol=0.05)
