"""Rows that a mask selects: every function of them runs, whatever their number is."""

import pytest
import torch
from torch import Tensor, nn

import pt2e_quant as pq
from pt2e_quant.flow.calibrate.sample import sqnr_db

FUNCTIONS = {
    "swish, written out": lambda r: r * torch.sigmoid(r),
    "swish of a flat tensor": lambda r: r.reshape(-1) * torch.sigmoid(r.reshape(-1)),
    "relu by a mask": lambda r: torch.where(r > 0, r, torch.zeros_like(r)),
    "norm, written out": lambda r: (r - r.mean(-1, True)) / (r.var(-1, False, True) + 1e-5).sqrt(),
    "softmax, written out": lambda r: r.exp() / r.exp().sum(-1, keepdim=True),
    "a share of the sum": lambda r: r.sum(-1) * r[:, 0],
    "mean of the rows": lambda r: r.mean(0) * r.sum(0),
    "products of rows": lambda r: r @ r.mT,
    "halves": lambda r: r.view(-1, 2, 4).transpose(1, 2).flatten(1),
    "the greatest": lambda r: r.topk(3, -1)[0],
    "counted": lambda r: torch.ones(r.shape[0], 1) * r + torch.arange(r.shape[0])[:, None],
}


class Selected(nn.Module):
    """Every function of the rows of a linear whose inputs have a positive sum."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> list[Tensor]:
        rows = self.linear(x)[x.sum(-1) > 0]
        torch._check(rows.shape[0] > 0)
        return [function(rows) for function in FUNCTIONS.values()]


@pytest.mark.parametrize("backend", ["onnx", "xnnpack"])
def test_functions_when_values_decide_the_size_then_as_the_model(backend):
    pytest.importorskip({"onnx": "onnxruntime", "xnnpack": "executorch"}[backend])
    torch.manual_seed(0)
    model, batches = Selected().eval(), [(torch.randn(12, 8),) for _ in range(4)]
    program = torch.export.export(model, batches[0])
    artifact = pq.quantize(
        program, calibration_data=batches, backend=backend, effort="fast", progress=False
    )
    for batch in batches:
        results = zip(FUNCTIONS, model(*batch), artifact.run(*batch), strict=True)
        for name, expected, found in results:
            assert found.shape == expected.shape, name
            assert sqnr_db(expected, found) > 30, name
