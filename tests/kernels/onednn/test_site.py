"""Images in channels-last order: laid out once for all readers, never where they are so."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pt2e_quant.backends import get
from pt2e_quant.flow.calibrate.calibrate import calibrate
from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e
from pt2e_quant.kernels.onednn.operators import ConvSum, QConv, aten

pytestmark = pytest.mark.usefixtures("unmeasured")

MAX_POOL = torch.ops.quantized.max_pool2d.default


class Branches(nn.Module):
    """An input and a pooled image that two convolutions read each, and a sum with the latter."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(4, 8, 1)
        self.a, self.b = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)

    def forward(self, x):
        y = F.max_pool2d(torch.relu(self.left(x) + self.right(x)), 2)
        return self.b(torch.relu(self.a(y) + y)) + self.a(y)


@pytest.fixture
def converted():
    torch.manual_seed(0)
    x = torch.randn(2, 4, 8, 8)
    prepared = prepare_pt2e(torch.export.export(Branches().eval(), (x,)), get("cpu").quantizer())
    calibrate(prepared, [(x,)], progress=False)
    return convert_pt2e(prepared), x


def test_images_when_read_twice_then_laid_out_once(converted):
    program = get("cpu").lower(converted[0]).program
    copied = [n.args[0] for n in program.graph.nodes if n.target is aten.contiguous.default]
    assert len(set(copied)) == len(copied)
    assert not {n.target for n in copied} & {QConv, ConvSum, MAX_POOL}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_convolutions_when_images_are_in_either_layout_then_give_the_canonical_result(
    converted, layout
):
    gm, x = converted
    artifact = get("cpu").lower(gm)
    given = x.contiguous(memory_format=layout)
    with torch.no_grad():
        expected = gm(x)
    for _ in range(2):  # sums write into their summand: a second call must find nothing changed
        torch.testing.assert_close(artifact.run(given), expected, rtol=0, atol=1e-5)
    assert torch.equal(given, x)
