"""Tensors with known scales (sigmoid, tanh, softmax) among others that share their scale."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import pt2e_quant as pq

BOUNDED = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softmax": lambda x: torch.softmax(x, 1),
    "reshaped": lambda x: torch.sigmoid(x).flatten(2).unflatten(2, (6, 6)),
}
SHARING = {
    "cat": lambda a, b: torch.cat([a, b], 1),
    "cat of two": lambda a, b: torch.cat([a, a.flip(3), b], 2),
    "stack": lambda a, b: torch.stack([a, b], 1).flatten(1, 2),
    "where": lambda a, b: torch.where(b > 1.0, a, b),
    "maximum": torch.maximum,
    "minimum": lambda a, b: torch.minimum(a, -b),
    "pad": lambda a, _: functional.pad(a, (1, 1), value=3.0),
    "clamp": lambda a, _: a.clamp(1.5, 4.0) + a,
}


class Net(nn.Module):
    """What shares one scale among a bounded tensor and one with values up to about 10."""

    def __init__(self, bounded, sharing, *, is_first: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.bounded, self.sharing, self.is_first = bounded, sharing, is_first
        self.after = nn.LazyConv2d(4, 1)

    def forward(self, x):
        pair = self.bounded(self.left(x)), 5 * self.right(x)
        return self.after(self.sharing(*(pair if self.is_first else pair[::-1])))


@pytest.mark.parametrize("backend", ["onnx", "xnnpack", "cpu"])
@pytest.mark.parametrize(
    ("bounded", "is_first"), [*((name, True) for name in BOUNDED), ("sigmoid", False)]
)
@pytest.mark.parametrize("sharing", SHARING)
def test_scale_when_others_share_it_with_a_bounded_tensor_then_no_value_is_cut_off(
    backend, bounded, sharing, is_first, unmeasured
):
    model = Net(BOUNDED[bounded], SHARING[sharing], is_first=is_first).eval()
    data = [(2 * torch.randn(2, 4, 6, 6),) for _ in range(6)]
    with torch.no_grad():
        expected = [model(*call) for call in data]
    program = torch.export.export(model, data[0])
    target = pq.backends.get(backend).allowing_slower()
    gm = pq.convert_pt2e(
        pq.calibrate(pq.prepare_pt2e(program, target.quantizer("int8")), data, progress=False)
    )
    assert pq.sqnr_db(expected, [gm(*call) for call in data]) > 25
    if bounded == "sigmoid" and is_first:
        artifact = target.lower(gm)
        assert pq.sqnr_db(expected, [artifact.run(*call) for call in data]) > 25
