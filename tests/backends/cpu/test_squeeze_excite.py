"""Squeeze-and-excite blocks as MobileNetV3 has them: convolutions in integers, gates in float."""

import pytest
import torch
from torch import nn

from pt2e_quant.backends import get
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.flow.calibrate.sample import sqnr_db

pytestmark = pytest.mark.usefixtures("unmeasured")


class Block(nn.Module):
    """Expand, depthwise, gate, project, and a shortcut (Howard et al. 2019, figure 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(8, 32, 1), nn.Hardswish())
        self.depthwise = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1, groups=32), nn.Hardswish())
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            *(nn.Conv2d(32, 8, 1), nn.ReLU()),
            *(nn.Conv2d(8, 32, 1), nn.Hardsigmoid()),
        )
        self.project = nn.Conv2d(32, 8, 1)

    def forward(self, x):
        y = self.depthwise(self.expand(x))
        return x + self.project(y * self.gate(y))


def test_squeeze_excite_when_lowered_then_convolutions_are_in_integers_and_the_gate_in_float(
    quantize_with, make_noise
):
    torch.manual_seed(0)
    model, x = nn.Sequential(Block(), nn.Conv2d(8, 4, 1)), make_noise(1, 8, 12, 12)
    gm = quantize_with(model, (x,))
    artifact = get("cpu").lower(gm)
    counts, floats = artifact.report.integer_ops, artifact.report.float_ops
    assert (counts["onednn.qconv_pointwise"], counts["onednn.qconv2d_pointwise"]) == (5, 1)
    assert (floats["aten.adaptive_avg_pool2d"], floats["aten.mul"]) == (1, 1)
    # What feeds them writes floats: nothing is dequantized for their sake.
    assert "dequantize_once" not in floats
    reasons = {record.op: record.reason for record in provenance_of(gm).floats}
    assert "by a gate of any size" in reasons["aten.mul"]
    assert "no faster than float's" in reasons["aten.adaptive_avg_pool2d"]
    with torch.no_grad():
        expected, canonical = model(x), gm(x)
        assert sqnr_db([canonical], [artifact.run(x)]) > sqnr_db([expected], [canonical]) + 20
