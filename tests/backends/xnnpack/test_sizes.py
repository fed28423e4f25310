"""Calls of other sizes than the first: small, large, small again, in a process of their own.

`test_table.py` does the same for every row of the table with dynamic batches.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import pt2e_quant as pq
from pt2e_quant.backends.xnnpack.backend import BACKEND
from pt2e_quant.backends.xnnpack.sizes import check_planned
from pt2e_quant.core.errors import ArtifactError
from pt2e_quant.core.qdq import is_qdq
from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.flow.calibrate.calibrate import calibrate
from pt2e_quant.flow.calibrate.sample import sqnr_db
from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e
from tests.backends.call_saved import call_pte


class GlobalPool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(F.relu(self.conv(x)).mean((2, 3)))


class Floats(nn.Module):
    """Operators that the delegate runs in float, and a linear that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.prelu, self.up = nn.PReLU(8), nn.ConvTranspose2d(8, 4, 3, 2)
        self.conv, self.depthwise = nn.Conv2d(8, 6, 3, 2, 1), nn.Conv2d(8, 8, 3, groups=8)

    def forward(self, x: Tensor, y: Tensor) -> list[Tensor]:
        r, s = torch.relu(x), torch.sigmoid(x)
        rows = r.flatten(2)
        return [
            self.linear(x.permute(0, 2, 3, 1)) * 2,
            self.prelu(x),
            self.up(r),
            self.conv(x),
            self.depthwise(x),
            s.mean((2, 3)),
            s.mean((2, 3), keepdim=True) * x,
            # At a batch of 1 the sum fits where an operand lies.
            torch.relu(torch.sigmoid(y) + s) * 2,
            torch.softmax(x, -1) + 1,
            torch.bmm(rows, rows.transpose(1, 2)),
            torch.softmax(torch.bmm(rows.transpose(1, 2), rows), -1),
            F.max_pool2d(r, 3, 2, 1),
            torch.cat([s, x], 1),
            F.pad(r, (1, 1, 2, 2)),
            r.amax(2, keepdim=True),
            r.amax(3, keepdim=True),
            torch.sqrt(r) + torch.exp(s) - torch.log(s) + torch.rsqrt(s) + s.pow(2),
            F.gelu(x) / torch.maximum(s, r.clamp(1, 2)),
            F.elu(x) + F.leaky_relu(x) + F.hardswish(x) + torch.sin(x) + torch.cos(x),
            r[:, 1:3],
            F.interpolate(x, scale_factor=2.0, mode="bilinear"),
        ]


class Rows(nn.Module):
    """Linears in turn: the scales of their rows are found at run time."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 64)
        self.layers = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return x + self.layers(x)


def lowered(model, inputs, shapes, recipe):  # type: ignore[no-untyped-def]
    ep = torch.export.export(model.eval(), inputs, dynamic_shapes=shapes)
    prepared = prepare_pt2e(ep, BACKEND.quantizer(recipe), strict=False)
    if recipe == "int8":
        calibrate(prepared, [inputs], progress=False)
    canonical = convert_pt2e(prepared)
    return canonical, BACKEND.lower(canonical, inputs, strict=False)


BATCHES = ((3, 8, 9, 9), (1, 8, 9, 9), (64, 8, 9, 9), (1, 8, 9, 9), (7, 8, 9, 9), (64, 8, 9, 9))
SPATIAL = (
    (2, 8, 9, 12),
    (2, 8, 5, 4),
    (2, 8, 32, 32),
    (2, 8, 5, 4),
    (2, 8, 4, 32),
    (2, 8, 32, 4),
    (2, 8, 32, 32),
)
CASES = {
    "global pool": (GlobalPool, "int8", ({0: Dim("batch", min=1, max=64)},)),
    "rows": (
        Rows,
        "int8_dynamic",
        ({0: Dim("batch", min=1, max=32), 1: Dim("tokens", min=1, max=32)},),
    ),
    "batch": (Floats, "w8", ({0: Dim("batch", min=1, max=64)}, None)),
    "height and width": (
        Floats,
        "w8",
        tuple({2: Dim("height", min=4, max=32), 3: Dim("width", min=4, max=32)} for _ in range(2)),
    ),
}


def calls_of(what, make_noise):  # type: ignore[no-untyped-def]
    """The example of the export, and the calls."""
    draws = torch.Generator().manual_seed(0)
    if what == "global pool":
        batches = (4, 64, 4, 1, 64)
        return (make_noise((4, 3, 16, 16)),), [(make_noise((b, 3, 16, 16), b),) for b in batches]
    if what == "rows":
        sizes = ((3, 5), (1, 1), (1, 32), (32, 1), (8, 32), (1, 1), (1, 32))
        made = [(torch.randint(0, 50, size, generator=draws),) for size in sizes]
    else:
        sizes = BATCHES if what == "batch" else SPATIAL
        made = [(make_noise(size), make_noise((1, *size[1:]), 1)) for size in sizes]
    return made[0], made[1:]


@pytest.mark.parametrize("what", CASES)
@torch.no_grad()
def test_file_when_calls_grow_and_shrink_then_each_is_right(make_noise, tmp_path, what):  # type: ignore[no-untyped-def]
    build, recipe, shapes = CASES[what]
    example, calls = calls_of(what, make_noise)
    canonical, artifact = lowered(build(), example, shapes, recipe)
    found = call_pte(artifact, calls, tmp_path)
    for call, results in zip(calls, found, strict=True):
        wanted = canonical(*call)
        several = isinstance(wanted, list)
        for at, (one, other) in enumerate(
            zip(results, wanted, strict=True) if several else [(results, wanted)]
        ):
            assert one.shape == other.shape
            # Scales of rows and steps of 8 bits, or sums in another order.
            bound = (1e-5 if recipe == "w8" else 0.02) * max(1.0, float(other.abs().max()))
            error = float((one - other).abs().max())
            assert error <= bound, f"result {at} of {tuple(one.shape)}: {error}"


class NoTokens(nn.Module):
    """A lookup of no tokens, joined to what a linear gives."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(8, 8), nn.Embedding(5, 8)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return torch.cat([self.linear(x), self.table(ids)], 1)


def test_tensor_without_elements_when_joined_then_every_batch_runs():
    rows = Dim("rows", min=1, max=9)
    batch = (torch.randn(3, 2, 8), torch.zeros(3, 0, dtype=torch.int64))
    artifact = pq.quantize(
        NoTokens().eval(),
        batch,
        dynamic_shapes={"x": {0: rows}, "ids": {0: rows}},
        calibration_data=[batch],
        backend="xnnpack",
        progress=False,
    )
    for count in (1, 9):
        found = artifact.run(torch.randn(count, 2, 8), torch.zeros(count, 0, dtype=torch.int64))
        assert found.shape == (count, 2, 8)


class Sizes(nn.Module):
    """Writes the first of all elements: the number of all is a product with a square."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone()
        x.view(-1)[0] = 1.0
        return x + x, self.linear(y)


def test_size_when_it_is_a_power_then_every_size_runs():
    n, m = Dim("n", min=1, max=9), Dim("m", min=1, max=8)
    batch = (torch.randn(2, 3, 3), torch.randn(2, 4))
    shapes = {"x": {0: n, 1: m, 2: m}, "y": {0: n}}
    artifact = pq.quantize(Sizes().eval(), batch, dynamic_shapes=shapes, **W8)
    for rows, side in ((1, 1), (9, 8), (2, 5)):
        x = torch.randn(rows, side, side)
        expected = 2 * x
        expected.view(-1)[0] = 2.0
        torch.testing.assert_close(artifact.run(x, torch.randn(rows, 4))[0], expected)


class Copies(nn.Module):
    """A transposed convolution of volumes, of which torch asks whether a size is below 16."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose3d(2, 8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(torch.copysign(x, x))


@pytest.mark.filterwarnings("ignore:no tensor of this graph")
def test_size_when_the_edge_program_narrows_it_then_planned_as_declared():
    side = Dim("side", min=2, max=20)
    x = torch.randn(1, 2, 4, 4, 4).to(memory_format=torch.channels_last_3d)
    model = Copies().eval()
    artifact = pq.quantize(model, (x,), dynamic_shapes={"x": {2: side, 4: side}}, **W8)
    x = torch.randn(1, 2, 20, 4, 20)
    assert sqnr_db([model(x).detach()], [artifact.run(x)]) > 30


class Pairs(nn.Module):
    """A sum and a product of each row of two inputs with numbers of rows of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.last = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.left(x).unsqueeze(1), self.right(y).unsqueeze(0)
        return self.last(a + b), a * b


class Opened(nn.Module):
    """Tensors without values that are filled, a turn around the ends, every other column."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=(1, 2), padding_mode="circular")

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.conv(x[..., ::2] + x[..., 1::2])
        filled = torch.empty(x.shape[0], 5)
        filled[:, :4] = y.mean((2, 3))
        filled[:, 4:] = x[:, :1, 0, 0]
        other = torch.empty_like(filled)
        other[:] = filled * 2
        return y, filled, other, x.new_empty(x.shape[0], 2).fill_(3.0), (x * 9).long().clamp(max=5)


def test_tensors_when_torch_leaves_their_values_open_then_every_size_runs():
    torch.manual_seed(0)
    sizes = {0: Dim("batch", max=4), 3: 2 * Dim("half", min=2, max=8)}
    images = [torch.rand(batch, 3, 4, width) for batch, width in ((2, 8), (4, 16), (1, 4))]
    model = Opened().eval()
    artifact = pq.quantize(
        model,
        (images[0],),
        dynamic_shapes=(sizes,),
        calibration_data=[(image,) for image in images],
        backend="xnnpack",
        progress=False,
    )
    for image in images:
        *floats, whole = zip(model(image), artifact.run(image), strict=True)
        assert all(sqnr_db(wanted, found) > 25 for wanted, found in floats)
        assert torch.equal(*whole)


def test_sum_when_two_dynamic_sizes_broadcast_then_every_size_runs():
    batches = [(torch.randn(5, 8), torch.randn(6, 8)) for _ in range(3)]
    sizes = [Dim(name, min=1, max=16) for name in ("a", "b")]
    artifact = pq.quantize(
        Pairs().eval(),
        batches[0],
        dynamic_shapes={"x": {0: sizes[0]}, "y": {0: sizes[1]}},
        calibration_data=batches,
        backend="xnnpack",
        progress=False,
    )
    x, y = torch.randn(16, 8), torch.randn(16, 8)
    whole = artifact.run(x, y)
    for rows, columns in ((1, 1), (16, 1), (1, 16), (16, 16), (5, 6)):
        for found, wanted in zip(artifact.run(x[:rows], y[:columns]), whole, strict=True):
            torch.testing.assert_close(found, wanted[:rows, :columns], rtol=1e-5, atol=1e-5)


class Gate(nn.Module):
    """A convolution of one pixel a channel, of which torch asks whether the batch is below 16."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(17, 1, 1), nn.Conv2d(1, 17, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x * F.hardsigmoid(self.up(F.relu(self.down(x.mean((2, 3), keepdim=True)))))
        return F.lp_pool2d(x, 2, 2).var(2)


class Windows(nn.Module):
    """The mean of each window of three by three, at any size."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        b, c, h, w = y.shape
        return y.view(b, c, h // 3, 3, w // 3, 3).mean((3, 5))


@pytest.mark.filterwarnings("ignore:no tensor of this graph")
def test_batch_above_fifteen_when_a_pass_asks_for_it_then_planned_as_declared():
    shapes = {"x": {0: Dim("s0", min=1, max=16)}}
    artifact = pq.quantize(Gate().eval(), (torch.randn(6, 17, 5, 8),), dynamic_shapes=shapes, **W8)
    assert artifact.run(torch.randn(16, 17, 5, 8)).shape == (16, 17, 4)


@pytest.mark.filterwarnings("ignore:no tensor of this graph")
def test_windows_when_sizes_are_found_by_torch_then_planned_for_the_largest():
    shapes = {"x": {2: Dim.AUTO, 3: Dim.AUTO}}
    artifact = pq.quantize(
        Windows().eval(),
        (torch.randn(2, 3, 24, 24),),
        dynamic_shapes=shapes,
        max_sizes={"x": {2: 48, 3: 48}},
        **W8,
    )
    assert artifact.run(torch.randn(2, 3, 48, 48)).shape == (2, 8, 8, 8)


W8: dict[str, Any] = {"backend": "xnnpack", "recipe": "w8", "strict": False, "progress": False}


def test_input_when_planned_smaller_than_declared_then_the_error_names_its_reader(quantize_with):
    gm = quantize_with(Gate(), (torch.randn(6, 17, 5, 8),), BACKEND.quantizer(), dynamic=True)
    check_planned(gm, capture_of(gm), [[64, 17, 5, 8]])
    with pytest.raises(ArtifactError, match=r'dimension 0 of input "x" up to 15, .* 64') as caught:
        check_planned(gm, capture_of(gm), [[15, 17, 5, 8]])
    operators = [n.name for n in gm.graph.nodes if n.op == "call_function" and not is_qdq(n)]
    assert caught.value.node_name in operators
    assert "source" in str(caught.value)
    assert caught.value.fix == "max_sizes={'x': {0: 15}}"
