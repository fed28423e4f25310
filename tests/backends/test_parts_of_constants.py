"""Operators with several results, of weights and of values, between quantized layers."""

import pytest
import torch
from torch import nn

import pt2e_quant as pq

PARTS = {
    "chunk": lambda v: v.chunk(2, 0),
    "split": lambda v: v.split([1, 1], 0),
    "unbind": lambda v: v.unbind(0),
    "sort": lambda v: v.sort(0)[0].unbind(0),
    "topk": lambda v: v.topk(2, 0)[0].unbind(0),
    "var_mean": lambda v: torch.var_mean(v, 0),
    "max": lambda v: (v.max(0)[0], v.min(0)[0]),
    "aminmax": lambda v: tuple(torch.aminmax(v, dim=0)),
    "one element": lambda v: v[0, :1].expand(2).chunk(2),
    "numbers": lambda v: v[0, :2].unbind(0),
}


class Modulated(nn.Module):
    """Scales and shifts by parts of a parameter, or of a value of its own."""

    def __init__(self, name, *, of_weight):
        super().__init__()
        torch.manual_seed(0)
        self.name, self.of_weight = name, of_weight
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 8)
        self.table = nn.Parameter(torch.rand(2, 16) + 0.5)
        self.other = nn.Linear(16, 32)

    def forward(self, x):
        source = self.table if self.of_weight else self.other(x.mean(0)).view(2, 16).sigmoid()
        scale, shift = PARTS[self.name](source)
        return self.last(torch.relu(self.first(x) * scale + shift))


@pytest.mark.usefixtures("unmeasured", "integers_everywhere")
@pytest.mark.parametrize("backend", ["xnnpack", "onnx", "cpu"])
@pytest.mark.parametrize("of_weight", [True, False])
@pytest.mark.parametrize("name", PARTS)
def test_parts_when_they_scale_and_shift_then_the_artifact_follows(name, of_weight, backend):
    model = Modulated(name, of_weight=of_weight).eval()
    data = [torch.randn(4, 16, generator=torch.Generator().manual_seed(i)) for i in range(8)]
    artifact = pq.quantize(
        model, args=(data[0],), calibration_data=data[:6], backend=backend, progress=False
    )
    assert pq.sqnr_db([model(x) for x in data[6:]], [artifact.run(x) for x in data[6:]]) > 25
