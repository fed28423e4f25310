"""Linears of no rows: oneDNN's product gives a matrix whatever the dimensions."""

import pytest
import torch
from torch import nn

from pt2e_quant import quantize
from pt2e_quant.backends import get

pytestmark = pytest.mark.usefixtures("unmeasured")


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x, keep):
        return self.second(self.first(x[keep]).relu()).sum((1, 2))


def _inputs(rows):
    return torch.randn(4, 5, 32), torch.arange(4) < rows


def test_linear_of_three_dimensions_when_no_row_is_chosen_then_no_rows_of_its_shape():
    torch.manual_seed(0)
    artifact = quantize(
        Chosen().eval(),
        _inputs(3),
        calibration_data=[_inputs(3) for _ in range(2)],
        backend=get("cpu").allowing_slower(),
        progress=False,
    )
    assert artifact.report.integer_ops["onednn.qlinear_pointwise"]
    for rows in (3, 0, 2):
        assert artifact.run(*_inputs(rows)).shape == (rows,)
