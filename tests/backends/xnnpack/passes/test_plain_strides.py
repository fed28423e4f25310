"""Parameters that are views: ExecuTorch takes strides for a layout, so none reach it."""

import pytest
import torch
from torch import Tensor, nn

import pt2e_quant as pq


class Probe(nn.Module):
    """Queries of one row, made by a transposition."""

    def __init__(self) -> None:
        super().__init__()
        self.probe = nn.Parameter(torch.arange(64.0).reshape(1, 4, 16).transpose(0, 1) / 64)
        self.linear = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(self.probe, self.linear(x).transpose(1, 2))


class Places(nn.Module):
    """A table by position whose channels lie last in memory."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.arange(256.0).reshape(1, 8, 8, 4) / 256
        self.table = nn.Parameter(table.permute(0, 3, 1, 2))
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return torch.where(y > 0, y, self.table) + self.table


@pytest.mark.parametrize(("model", "shape"), [(Probe(), (4, 16, 8)), (Places(), (1, 3, 8, 8))])
def test_lower_when_a_parameter_is_a_view_then_it_runs_and_the_model_keeps_it(
    model, shape, make_noise
):
    x = make_noise(shape)
    kept = {name: (p.stride(), p.data_ptr()) for name, p in model.named_parameters()}
    artifact = pq.quantize(model.eval(), args=(x,), calibration_data=[x], backend="xnnpack")
    assert artifact.report.sqnr_canonical_db > 60
    assert kept == {name: (p.stride(), p.data_ptr()) for name, p in model.named_parameters()}
