"""A factor and a term for all channels: behind a clamp, and in front of the layers that read them.

HGNetV2 and PP-LCNetV3 have such an affine behind each activation function.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import pt2e_quant as pq
from pt2e_quant.passes.batch_norm.fold_affines import fold_affines
from pt2e_quant.passes.batch_norm.fold_affines_ahead import FOLD_AFFINES, fold_affines_ahead
from tests.passes.batch_norm.test_fold_affines import STEPS
from tests.passes.conftest import Program

IMAGE = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(1))
CLAMPS = {
    "relu": functional.relu,
    "relu6": functional.relu6,
    "hardtanh": lambda x: functional.hardtanh(x, -0.25, 0.5),
    "clamp": lambda x: x.clamp(-0.5, 0.25),
    "clamp min": lambda x: x.clamp(min=-0.3),
    "clamp max": lambda x: x.clamp(max=0.3),
}
LAYERS = {
    "linear": lambda: nn.Linear(6, 3),
    "conv": lambda: nn.Conv2d(4, 6, 3),
    "no bias": lambda: nn.Conv2d(4, 6, 3, bias=False),
    "depthwise": lambda: nn.Conv2d(4, 8, 3, stride=2, groups=4),
    "valid": lambda: nn.Conv2d(4, 6, 3, padding="valid"),
    "dilated": lambda: nn.Conv2d(4, 6, 2, dilation=2),
}
_NUMBERS = st.floats(0.25, 2.0).map(lambda size: round(size, 3)) | st.floats(-2.0, -0.25)
_STEPS = st.lists(st.tuples(st.sampled_from(sorted(STEPS)), _NUMBERS), min_size=1, max_size=4)


class Affine(nn.Module):
    """Steps of one number each."""

    def __init__(self, steps, *, is_trained: bool = True) -> None:
        super().__init__()
        self.steps = [STEPS[name] for name, _ in steps]
        for place, (_, number) in enumerate(steps):
            value = torch.tensor([number])
            if is_trained:
                self.register_parameter(f"c{place}", nn.Parameter(value))
            else:
                self.register_buffer(f"c{place}", value)

    def forward(self, x):
        for place, step in enumerate(self.steps):
            x = step(x, getattr(self, f"c{place}"))
        return x


class Net(nn.Module):
    """Modules and functions, one after another."""

    def __init__(self, *parts) -> None:
        super().__init__()
        self.parts = parts
        self.held = nn.ModuleList(part for part in parts if isinstance(part, nn.Module))

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(CLAMPS)), st.sampled_from(sorted(CLAMPS)), _STEPS, _STEPS)
def test_fold_affines_when_clamps_are_between_then_layer_and_clamps_alone(one, two, before, behind):
    torch.manual_seed(0)
    parts = nn.Conv2d(4, 6, 3), CLAMPS[one], Affine(before), CLAMPS[two], Affine(behind)
    p = Program(Net(*parts, torch.tanh), (IMAGE,))
    p.apply(fold_affines)
    left = p.targets()
    assert sum(left.values()) == 4
    assert left["aten.conv2d.default"] == left["aten.tanh.default"] == 1
    p.matches().leaves_model_alone().is_idempotent(fold_affines)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(LAYERS)), _STEPS, st.booleans())
def test_fold_affines_ahead_when_no_zeros_are_padded_then_the_layer_alone(kind, steps, is_trained):
    torch.manual_seed(0)
    p = Program(Net(torch.tanh, Affine(steps, is_trained=is_trained), LAYERS[kind]()), (IMAGE,))
    p.apply(fold_affines_ahead)
    assert sum(p.targets().values()) == 2
    p.matches().leaves_model_alone().is_idempotent(fold_affines_ahead)


class Fork(nn.Module):
    """Two layers that read one affine, and perhaps something else that does."""

    def __init__(self, *, has_skip: bool, padding: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.affine = Affine([("mul", 1.5), ("add", 0.5)])
        self.left, self.right = (nn.Conv2d(4, 4, 1, padding=padding) for _ in range(2))
        self.has_skip = has_skip

    def forward(self, x):
        y = self.affine(x.tanh())
        z = self.left(y) - self.right(y)
        return z + y if self.has_skip else z


@pytest.mark.parametrize(
    ("model", "is_folded"),
    [
        (Fork(has_skip=False), True),
        (Fork(has_skip=True), False),
        (Fork(has_skip=False, padding=1), False),
        (Net(torch.tanh, Affine([("mul", 0.0)]), nn.Conv2d(4, 4, 1)), False),
        (Net(torch.tanh, Affine([("div", 0.0)]), nn.Conv2d(4, 4, 1)), False),
        (Net(torch.tanh, Affine([("mul", -3.0)]), nn.Conv2d(4, 4, 3, padding=1)), True),
        (Net(torch.tanh, Affine([("mul", 2.0)]), nn.Conv2d(4, 4, 3, padding="same")), True),
    ],
    ids=["two layers", "skip", "padded", "zero", "quotient", "padded factor", "same"],
)
def test_fold_affines_ahead_when_readers_differ_then_folded_where_exact(program, model, is_folded):
    p = program(model, (IMAGE,))
    assert fold_affines_ahead(p.gm).changed == is_folded
    if is_folded:
        p.matches()


def test_fold_affines_ahead_when_a_weight_is_shared_then_left_with_the_reason(program):
    layer = nn.Conv2d(4, 4, 1)
    p = program(Net(torch.tanh, Affine([("mul", 2.0)]), layer, torch.tanh, layer), (IMAGE,))
    result = fold_affines_ahead(p.gm)
    assert not result.changed
    (note,) = result.notes
    assert note.skipped
    assert "shared" in note.text


def affine_net():
    """A block of HGNetV2, and one of PP-LCNetV3."""
    torch.manual_seed(0)
    affines = [Affine([("mul", 1.0 + at / 5), ("add", at / 10 - 0.2)]) for at in range(5)]
    parts = (
        *(nn.Conv2d(4, 16, 3, padding=1), functional.relu, affines[0]),
        *(nn.Conv2d(16, 16, 3, padding=1), functional.relu, affines[1]),
        *(nn.Conv2d(16, 16, 1), functional.hardswish, affines[2]),
        *(nn.Conv2d(16, 16, 1), functional.relu, affines[3]),
    )
    return Net(*parts, nn.Conv2d(16, 8, 1)).eval()


@pytest.mark.parametrize("backend", ["xnnpack", "onnx", "cpu"])
def test_prepare_when_affines_follow_activations_then_layers_and_activations_alone(
    backend, unmeasured
):
    model, data = affine_net(), [(torch.randn(2, 4, 6, 6),) for _ in range(4)]
    program = torch.export.export(model, data[0])
    quantizer = pq.backends.get(backend).allowing_slower().quantizer("int8")
    gm = pq.convert_pt2e(pq.calibrate(pq.prepare_pt2e(program, quantizer), data, progress=False))
    computed = {
        n.name.rpartition("_")[0] if n.name[-1].isdigit() and n.name[-2] == "_" else n.name
        for n in gm.graph.nodes
        if n.op == "call_function" and "quantize" not in n.name and n.name != "_guards_fn"
    }
    assert computed == {"conv2d", "clamp", "hardswish", "relu"}
    artifact = pq.backends.get(backend).allowing_slower().lower(gm)
    held = [(torch.randn(2, 4, 6, 6),) for _ in range(4)]
    with torch.no_grad():
        expected = [model(*call) for call in held]
    assert pq.sqnr_db(expected, [artifact.run(*call) for call in held]) > 25


def test_fold_affines_order_when_both_fit_then_the_clamp_keeps_its_bounds(program):
    parts = nn.Conv2d(4, 4, 1), functional.relu, Affine([("mul", 2.0), ("add", 1.0)])
    p = program(Net(*parts, nn.Conv2d(4, 4, 1)), (IMAGE,)).apply(*FOLD_AFFINES)
    assert set(p.targets()) == {"aten.conv2d.default", "aten.relu.default"}
    p.matches()
