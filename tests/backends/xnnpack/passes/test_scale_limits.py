"""Any scales of inputs, weights and results: the file loads, and gives what its graph gives."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pt2e_quant as pq
from pt2e_quant.backends.xnnpack.backend import BACKEND
from pt2e_quant.backends.xnnpack.table import STATIC_ROWS
from pt2e_quant.core.qdq import DequantizePerChannel, DequantizePerTensor, QuantizePerTensor
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.op_table import OpKind
from tests.parameters import named_subset

FIXED = (1 / 256, 1 / 128)
"""Scales that sigmoid and tanh always have."""

ONE = {
    "abs": torch.abs,
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 1),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
    "ceil": torch.ceil,
    "clip": torch.relu,
    "elu": F.elu,
    "exp": lambda x: torch.exp(-x.abs()),
    "floor": torch.floor,
    "gelu": F.gelu,
    "hardswish": F.hardswish,
    "leaky_relu": F.leaky_relu,
    "log": lambda x: torch.log(x.abs() + 0.5),
    "mean": lambda x: x.mean((2, 3)),
    "neg": torch.neg,
    "sigmoid": torch.sigmoid,
    "sqrt": lambda x: x.abs().sqrt(),
    "tanh": torch.tanh,
}
TWO = {
    "add": torch.add,
    "div": lambda x, y: x / (y.abs() + 1),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "mul": torch.mul,
    "sub": torch.sub,
}
LAYERS = {
    "conv1d": lambda: nn.Conv1d(4, 3, 3, bias=False),
    "conv2d": lambda: nn.Conv2d(4, 3, 3, bias=False),
    "conv_transpose1d": lambda: nn.ConvTranspose1d(4, 3, 3, bias=False),
    "conv_transpose2d": lambda: nn.ConvTranspose2d(4, 3, 3, bias=False),
    "linear": lambda: nn.Linear(6, 3, bias=False),
}


class Entries(nn.Module):
    """Every entry of the table whose result has a scale of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: make() for name, make in LAYERS.items()})

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> dict[str, Tensor]:
        found = {name: body(x) for name, body in ONE.items()}
        found |= {name: body(x, y) for name, body in TWO.items()}
        reads = {name: z if "1d" in name else x for name in LAYERS}
        return found | {name: layer(reads[name]) for name, layer in self.layers.items()}


def rescale(gm, draws: random.Random) -> list[float]:
    """Give inputs, weights and results scales of random magnitude; all but the weights'."""

    def give(quantize, scale):
        quantize.args = (quantize.args[0], scale, *quantize.args[2:])
        for user in list(quantize.users):
            assert user.target is DequantizePerTensor
            user.args = (user.args[0], scale, *user.args[2:])

    def drawn():
        return 10 ** draws.uniform(-6, 6)

    inputs = {name: drawn() for name in "xyz"}
    for node in gm.graph.nodes:
        if node.target is QuantizePerTensor and node.args[0].op == "placeholder":
            give(node, inputs[node.args[0].name])
        elif node.target is DequantizePerChannel:
            scale = constant_of(gm, node.args[1])
            with torch.no_grad():
                scale.mul_(drawn())
    scales = []
    for result in gm.graph.output_node().args[0]:
        assert result.target is DequantizePerTensor
        if result.args[1] not in FIXED:
            give(result.args[0], drawn())
        scales.append(result.args[1])
    gm.recompile()
    return [*inputs.values(), *scales]


def test_entries_when_listed_then_every_one_with_a_scale_of_its_own():
    rows = {row.name for row in STATIC_ROWS if not row.share and row.kind is not OpKind.MOVES}
    assert rows == {*ONE, *TWO, *LAYERS}


@pytest.mark.parametrize("seed", named_subset(range(6), 0))
def test_scales_when_of_any_magnitude_then_loads_and_agrees(
    every_row, quantize_with, make_noise, seed
):
    inputs = make_noise((2, 4, 6, 6)), make_noise((2, 4, 6, 6), 1), make_noise((2, 4, 6), 2)
    gm = quantize_with(Entries(), inputs, every_row())
    drawn = rescale(gm, random.Random(seed))
    call_scales, scales = drawn[:3], drawn[3:]
    artifact = BACKEND.lower(gm, verify=False)
    call = tuple(40 * s * value for s, value in zip(call_scales, inputs, strict=True))
    wanted, found = gm(*call), artifact.run(*call)
    for scale, (name, value) in zip(scales, wanted.items(), strict=True):
        error = float(((found[name] - value) / scale).abs().max())
        assert error <= 2.01, f"{name}: {error} steps of {scale}"


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Linear(3, 4, bias=False), (5, 3)),
        (lambda: nn.Conv1d(3, 4, 3, bias=False), (2, 3, 6)),
        (lambda: nn.Conv2d(3, 4, 3, bias=False), (2, 3, 6, 6)),
        (lambda: nn.Conv2d(4, 4, 3, groups=4, bias=False), (2, 4, 6, 6)),
        (lambda: nn.ConvTranspose2d(3, 4, 3, bias=False), (2, 3, 6, 6)),
    ],
)
def test_layer_when_dead_behind_large_inputs_then_float_with_a_note(make_noise, make, shape):
    x = 4e5 * make_noise(shape)
    model = nn.Sequential(make()).eval()
    nn.init.zeros_(model[0].weight)
    # With `int8` a linear alone takes scales of run time, and its output has none.
    artifact = pq.quantize(
        model, args=(x,), calibration_data=[x], backend="xnnpack", recipe="int8_minmax"
    )
    assert torch.equal(artifact.run(x), model(x))
    assert any("runs in float" in note for note in artifact.report.notes)


class OfZeros(nn.Module):
    """A layer that reads zeros alone: its bias is far beyond int32 in the steps of its sums."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)
        with torch.no_grad():
            self.conv.weight.fill_(1e-3)
            self.conv.bias.fill_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(torch.relu(x) - torch.relu(x)) + x


def test_bias_when_beyond_int32_in_the_steps_of_its_sums_then_float_with_a_note(make_noise):
    x = make_noise((1, 4, 5, 5))
    artifact = pq.quantize(
        OfZeros().eval(), (x,), calibration_data=[x], backend="xnnpack", progress=False
    )
    assert any("steps of its sums, of which int32 holds" in n for n in artifact.report.notes)


def test_sum_when_its_result_is_tiny_then_float_with_a_note(every_row, quantize_with, make_noise):
    x = make_noise((2, 4, 6, 6))
    gm = quantize_with(Sum(), (x, -x + 1e-7), every_row())
    artifact = BACKEND.lower(gm)
    assert any("add: float in the delegate" in note for note in artifact.report.notes)
    assert artifact.report.float_ops == {"Add": 1}


class Sum(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y
