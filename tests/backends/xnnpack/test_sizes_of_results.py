"""Models that read the sizes of an operator's result, as encoders of speech and segmenters do."""

import pytest
import torch
from torch import nn

import pt2e_quant as pq


class Subsampled(nn.Module):
    """Two strided convolutions whose channels and bins become the features of each step."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1)
        self.out, self.kind = nn.Linear(80, 8), kind

    def forward(self, x):
        x = self.second(torch.relu(self.first(x.unsqueeze(1))))
        batch, channels, time, bins = x.shape
        sizes = batch, time, channels * bins
        match self.kind:
            case "copied":
                return self.out(x.transpose(1, 2).contiguous().view(sizes))
            case "cloned":
                return self.out(x.permute(0, 2, 1, 3).clone().reshape(sizes))
            case "returned":
                return torch.relu(x).transpose(1, 2).contiguous().view(sizes)
            case "flattened":
                return x.reshape(batch, channels * time, bins)
        return torch.relu(x).repeat(1, 1, 1, 2) * time


@pytest.mark.parametrize("kind", ["copied", "cloned", "returned", "flattened", "multiplied"])
def test_result_when_its_sizes_are_read_then_its_operator_is_in_the_delegate(kind):
    torch.manual_seed(0)
    model = Subsampled(kind).eval()
    batch, time = torch.export.Dim("batch", max=8), 4 * torch.export.Dim("quarter", max=16)
    batches = [(torch.randn(2, 24, 40),) for _ in range(4)]
    artifact = pq.quantize(
        model,
        batches[0],
        dynamic_shapes=({0: batch, 1: time},),
        calibration_data=batches,
        backend="xnnpack",
        progress=False,
    )
    outside = [name for name in artifact.report.float_ops if "convolution" in name]
    assert outside == []
    for call in (batches[0], (torch.randn(3, 48, 40),), (torch.randn(1, 8, 40),)):
        assert pq.sqnr_db(model(*call), artifact.run(*call)) > 25.0
