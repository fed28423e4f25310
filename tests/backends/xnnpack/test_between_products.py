"""What stands between convolutions and linears: views, pads, weights of run time, transposes."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pt2e_quant as pq
from pt2e_quant.flow.calibrate.sample import sqnr_db

BACKEND = pq.backends.get("xnnpack")
BATCH = torch.export.Dim("batch", min=1, max=8)


class Call(nn.Module):
    """A function of two convolutions, two linears and an input."""

    def __init__(self, body) -> None:
        super().__init__()
        self.body = body
        self.a, self.b = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.rows, self.up = nn.Linear(8, 8), nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.sequence, self.kernel = nn.Conv1d(8, 8, 3), nn.Linear(8, 32)
        self.wide = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def shuffle(m, x):
    h = m.a(x)
    n, c, height, width = h.shape
    h = h.view(n, 2, c // 2, height, width).transpose(1, 2).contiguous()
    return m.b(h.view(n, c, height, width))


def own_kernel(m, x):
    return F.conv2d(m.a(x), m.kernel(x.mean((0, 2, 3))).view(4, 8, 1, 1))


def read_twice(m, x):
    h = m.up(x)
    return torch.relu(h + m.wide(h))


STATIC = {
    "softmax of rows": lambda m, x: torch.softmax(4 * m.b(torch.softmax(4 * m.a(x), -1)), 3),
    "channel shuffle": shuffle,
    "pad of a result": lambda m, x: F.pad(m.sequence(x.flatten(2)), (2, 0)),
    "unfold": lambda m, x: F.unfold(m.a(x), 3),
    "unfold into rows": lambda m, x: m.rows(F.unfold(m.a(x), 1).transpose(1, 2)),
    "fold": lambda m, x: m.b(F.fold(F.unfold(m.a(x), 2, stride=2), (8, 8), 2, stride=2)),
    "weight of run time": own_kernel,
}
DYNAMIC = {
    "rows of a convolution": lambda m, x: m.rows(m.a(x)),
    "rows of a permuted convolution": lambda m, x: m.rows(m.a(x).permute(0, 2, 3, 1)),
    "rows of a sum": lambda m, x: m.rows(m.a(x) + m.b(x)),
    "read by a linear and a sum": read_twice,
    "rows of a pool": lambda m, x: m.rows(F.max_pool2d(x, 3, 1, 1)),
    "weight of run time": own_kernel,
}


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("name", STATIC)
def test_operators_between_products_when_int8_then_as_the_graph(name, is_dynamic, make_noise):
    artifact, gm = _lowered(STATIC[name], "int8", is_dynamic, make_noise)
    for size in (4, 2) if is_dynamic else (4, 4):
        x = make_noise((size, 8, 8, 8), size)
        # A value at a tie may round to the other step.
        assert sqnr_db(gm(x), artifact.run(x)) > 45


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("name", DYNAMIC)
def test_operators_between_products_when_quantized_at_run_time_then_as_the_graph(
    name, is_dynamic, make_noise
):
    artifact, gm = _lowered(DYNAMIC[name], "int8_dynamic", is_dynamic, make_noise)
    found = Counter(op.name for op in artifact.contents().ops() if op.multiplies_integers)
    assert found["FullyConnected"] == 1
    for size in (4, 2) if is_dynamic else (4, 4):
        x = make_noise((size, 8, 8, 8), size)
        assert sqnr_db(gm(x), artifact.run(x)) > 45


def _lowered(body, recipe, is_dynamic, make_noise):
    example = make_noise((4, 8, 8, 8))
    shapes = ({0: BATCH},) if is_dynamic else None
    ep = torch.export.export(Call(body).eval(), (example,), dynamic_shapes=shapes)
    prepared = pq.prepare_pt2e(ep, BACKEND.quantizer(recipe))
    if recipe == "int8":
        data = [make_noise((4, 8, 8, 8), seed) for seed in range(4)]
        pq.calibrate(prepared, data, progress=False)
    gm = pq.convert_pt2e(prepared)
    return BACKEND.lower(gm, (example,)), gm
