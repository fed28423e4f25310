"""Convolutions of a canonical graph become int8_conv2d; what it cannot do stays float."""

import pytest
import torch
from torch import nn

from pt2e_quant.backends.cuda.backend import BACKEND
from pt2e_quant.core.errors import AnnotationError
from pt2e_quant.flow.calibrate.calibrate import calibrate
from pt2e_quant.flow.calibrate.sample import sqnr_db
from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e
from pt2e_quant.kernels.int8_conv2d.op import Int8Conv2d

ALLOWING = BACKEND.allowing_unmeasured()
BATCH = torch.export.Dim("batch", min=1, max=64)


class Images(nn.Module):
    """A stem, a residual block, a depthwise and a grouped convolution, one padded by name."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 5, stride=2, padding=2)
        self.block = nn.Conv2d(8, 8, 3, padding="same", bias=False)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.grouped = nn.Conv2d(8, 6, 3, stride=(1, 2), dilation=(2, 1), groups=2)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        x = torch.relu(self.block(x) + x)
        x = nn.functional.relu6(self.depthwise(x))
        return self.grouped(x)


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(4, 8, 3, padding=1)
        self.second = nn.Conv1d(8, 8, 3, padding=2, dilation=2)

    def forward(self, x):
        x = torch.relu(self.first(x))
        return torch.relu(self.second(x) + x)


def canonical(model, shape):
    torch.manual_seed(0)
    ep = torch.export.export(model.eval(), (torch.randn(4, *shape),), dynamic_shapes=({0: BATCH},))
    prepared = prepare_pt2e(ep, BACKEND.quantizer("int8"))
    calibrate(prepared, [(torch.randn(8, *shape),) for _ in range(3)], progress=False)
    return convert_pt2e(prepared)


@pytest.mark.parametrize(
    ("model", "shape", "count"), [(Images(), (3, 17, 16), 4), (Sequence(), (4, 13), 2)]
)
def test_convolutions_when_lowered_then_each_is_one_call_and_numbers_hold(model, shape, count):
    gm = canonical(model, shape)
    artifact = ALLOWING.lower(gm)
    assert artifact.report.integer_ops["int8_conv2d"] == count
    found = [n for n in artifact.module.graph.nodes if n.target is Int8Conv2d]
    # Each reads the integers that the one before it wrote, channels-last.
    assert all(n.args[0].meta["val"].dtype is torch.int8 for n in found)
    assert all(n.meta["val"].stride()[1] == 1 for n in found)
    assert found[1].kwargs["activation"] == "relu"
    assert found[1].kwargs["residual"].meta["val"].dtype is torch.int8
    x = torch.randn(3, *shape)
    # Sums are exact here and rounded in the q/dq graph: a tie may fall to the other side.
    assert sqnr_db([gm(x)], [artifact.run(x)]) > 40


@pytest.mark.filterwarnings("ignore:Using padding:UserWarning")
def test_convolution_when_padding_differs_on_its_sides_then_is_refused():
    class Uneven(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 2, padding="same")

        def forward(self, x):
            return self.conv(x)

    ep = torch.export.export(Uneven().eval(), (torch.randn(1, 3, 6, 6),))
    with pytest.raises(AnnotationError, match="conv2d needs: padding that is the same on both"):
        prepare_pt2e(ep, BACKEND.quantizer("int8"))
