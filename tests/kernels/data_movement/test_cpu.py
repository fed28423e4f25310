"""Max pools on the integers of oneDNN's operators."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pt2e_quant.backends import get
from pt2e_quant.flow.calibrate.calibrate import calibrate
from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e

pytestmark = pytest.mark.usefixtures("unmeasured")


class Pooled(nn.Module):
    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.reads = reads
        self.a, self.b = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)

    def forward(self, x):
        y, places = F.max_pool2d(torch.relu(self.a(x)), 2, return_indices=True)
        return (self.b(y), places) if self.reads else (self.b(y),)


@pytest.mark.parametrize("reads", [False, True])
def test_max_pool_when_it_gives_indices_then_on_integers_unless_they_are_read(reads):
    torch.manual_seed(0)
    x = torch.randn(2, 4, 8, 8)
    prepared = prepare_pt2e(torch.export.export(Pooled(reads).eval(), (x,)), get("cpu").quantizer())
    calibrate(prepared, [(x,)], progress=False)
    gm = convert_pt2e(prepared)
    artifact = get("cpu").lower(gm)
    assert artifact.report.integer_ops.get("quantized.max_pool2d", 0) == (not reads)
    with torch.no_grad():
        for made, wanted in zip(artifact.run(x), gm(x), strict=True):
            torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-5)
