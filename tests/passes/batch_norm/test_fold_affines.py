"""Sums and products per channel behind a conv or linear, folded into its weight and bias."""

import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.output_moments import OUTPUT_MOMENTS_KEY
from pt2e_quant.graph.pipeline import run_passes
from pt2e_quant.passes.batch_norm.fold_affines import fold_affines
from pt2e_quant.passes.batch_norm.fold_batch_norm import fold_batch_norm
from pt2e_quant.passes.cleanup.drop_dead_constants import drop_dead_constants
from pt2e_quant.passes.cleanup.fold_constants import fold_constants
from tests.passes.conftest import Program

IMAGE = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(1))
ROWS = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(4))
PER_CHANNEL = torch.tensor([0.5, -2.0, 1.5, 3.0])


class FrozenNorm(nn.Module):
    """A batch norm of buffers, computed in the graph, as detection models write it."""

    def __init__(self, channels):
        super().__init__()
        self.register_buffer("weight", torch.rand(channels) + 0.5)
        self.register_buffer("bias", torch.randn(channels))
        self.register_buffer("mean", torch.randn(channels))
        self.register_buffer("var", torch.rand(channels) + 0.5)

    def forward(self, x):
        weight, bias, mean, var = (
            t.reshape(1, -1, 1, 1) for t in (self.weight, self.bias, self.mean, self.var)
        )
        scale = weight * (var + 1e-5).rsqrt()
        return x * scale + (bias - mean * scale)


def frozen_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, bias=False),
        FrozenNorm(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=8),
        FrozenNorm(8),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 6, 2, groups=2),
        FrozenNorm(6),
    ).eval()


def test_fold_affines_when_norms_are_frozen_then_convolutions_alone(program):
    p = program(frozen_net(), (IMAGE,))
    p.apply(fold_constants, fold_affines, drop_dead_constants)
    p.shows(
        """
        input: f32[2, 4, 6, 6] = input
        conv2d: f32[2, 8, 4, 4] = conv2d(input, 0.weight, bias=0.bias)
        relu: f32[2, 8, 4, 4] = relu(conv2d)
        conv2d_1: f32[2, 8, 2, 2] = conv2d(relu, 3.weight, bias=3.bias, groups=8)
        relu_1: f32[2, 8, 2, 2] = relu(conv2d_1)
        conv_transpose2d: f32[2, 6, 3, 3] = conv_transpose2d(relu_1, 6.weight, bias=6.bias, groups=2)
        return (conv_transpose2d)
        """  # noqa: E501
    )
    p.matches((IMAGE * 2,)).leaves_model_alone().is_idempotent(fold_affines)


PRODUCERS = {
    "conv1d": (lambda bias: nn.Conv1d(4, 6, 3, bias=bias), (2, 4, 7)),
    "conv2d": (lambda bias: nn.Conv2d(4, 6, 3, bias=bias, padding=1), (2, 4, 5, 5)),
    "depthwise": (lambda bias: nn.Conv2d(4, 8, 3, groups=4, bias=bias), (1, 4, 5, 5)),
    "one channel": (lambda bias: nn.Conv2d(4, 1, 3, bias=bias), (1, 4, 5, 5)),
    "no batch": (lambda bias: nn.Conv2d(4, 6, 3, bias=bias), (4, 5, 5)),
    "conv3d": (lambda bias: nn.Conv3d(2, 4, 2, bias=bias), (1, 2, 3, 3, 3)),
    "transposed": (lambda bias: nn.ConvTranspose2d(4, 6, 2, groups=2, bias=bias), (2, 4, 3, 3)),
    "linear": (lambda bias: nn.Linear(4, 6, bias=bias), (2, 3, 4)),
    "turned linear": (lambda bias: nn.Linear(4, 6, bias=bias), (2, 3, 4)),
}
STEPS = {
    "mul": operator.mul,
    "add": operator.add,
    "sub": operator.sub,
    "div": operator.truediv,
    "left mul": lambda x, c: c * x,
    "left add": lambda x, c: c + x,
    "left sub": lambda x, c: c - x,
    "scaled add": lambda x, c: torch.add(x, c, alpha=3),
    "left scaled sub": lambda x, c: torch.sub(c, x, alpha=0.5),
}


class Chain(nn.Module):
    def __init__(self, kind, has_bias, steps):
        super().__init__()
        self.producer, self.kind = PRODUCERS[kind][0](has_bias), kind
        self.steps = [STEPS[name] for name, _ in steps]
        shape = torch.export.export(self.producer, (torch.zeros(PRODUCERS[kind][1]),))
        made = next(reversed(shape.graph.find_nodes(op="output"))).args[0][0].meta["val"].shape
        rank, width = len(made), made[-1 if "linear" in kind else self._dim(kind, len(made))]
        dim = {"linear": rank - 1, "turned linear": 1}.get(kind, self._dim(kind, rank))
        for number, (_, form) in enumerate(steps):
            values = torch.rand(1 if form == "one value" else width) + 0.5
            lengths = [1] * rank
            lengths[dim] = -1
            value = values.view(lengths if form == "full rank" else lengths[dim:])
            self.register_parameter(f"c{number}", nn.Parameter(value))

    @staticmethod
    def _dim(kind, rank):
        return 0 if kind == "no batch" else 1

    def forward(self, x):
        y = self.producer(x)
        if self.kind == "turned linear":
            y = y.transpose(1, 2)
        for number, step in enumerate(self.steps):
            y = step(y, getattr(self, f"c{number}"))
        return y.tanh()


@settings(max_examples=40)
@given(
    kind=st.sampled_from(sorted(PRODUCERS)),
    has_bias=st.booleans(),
    steps=st.lists(
        st.tuples(
            st.sampled_from(sorted(STEPS)),
            st.sampled_from(["full rank", "trailing", "one value"]),
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_fold_affines_when_written_in_any_form_then_the_layer_alone_with_equal_values(
    kind, has_bias, steps
):
    torch.manual_seed(len(steps))
    p = Program(Chain(kind, has_bias, steps), (torch.randn(PRODUCERS[kind][1]),))
    p.apply(fold_affines)
    left = {"aten.tanh.default"} | ({"aten.transpose.int"} if kind == "turned linear" else set())
    assert len(p.targets()) == 1 + len(left) == sum(p.targets().values())
    assert left < set(p.targets())
    p.matches().leaves_model_alone().is_idempotent(fold_affines)


class Behind(nn.Module):
    """A layer, and what is made of its result and a constant."""

    def __init__(self, layer, constant, combine):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.combine = layer(), combine
        self.register_buffer("c", constant)

    def forward(self, x):
        return self.combine(self, x)


def conv():
    return nn.Conv2d(4, 4, 1)


@pytest.mark.parametrize(
    ("layer", "constant", "combine", "x"),
    [
        (conv, PER_CHANNEL, lambda m, x: m.layer(x)[..., :4] * m.c, IMAGE),
        (conv, torch.ones(6), lambda m, x: m.layer(x) * m.c, IMAGE),
        (conv, torch.ones(2, 4, 1, 1), lambda m, x: m.layer(x) * m.c, IMAGE),
        (conv, torch.ones(1, 2, 4, 1, 1), lambda m, x: m.layer(x) * m.c, IMAGE),
        (conv, PER_CHANNEL.view(4, 1, 1), lambda m, x: m.c / m.layer(x), IMAGE),
        (conv, PER_CHANNEL.view(4, 1, 1).double(), lambda m, x: m.layer(x) * m.c, IMAGE),
        (conv, PER_CHANNEL.view(4, 1, 1), lambda m, x: m.layer(x) * 0.5, IMAGE),
        (
            lambda: nn.Linear(4, 4),
            PER_CHANNEL.view(4, 1),
            lambda m, x: m.layer(x) * m.c,
            ROWS[:, :4],
        ),
    ],
    ids=["slice", "column", "images", "rank", "quotient", "promoted", "number", "rows"],
)
def test_fold_affines_when_not_a_value_for_each_channel_then_left(
    program, layer, constant, combine, x
):
    p = program(Behind(layer, constant, combine), (x,))
    before = p.text
    assert not fold_affines(p.gm).changed
    assert p.text == before


def both(model, x):
    y = model.layer(x)
    return y * model.c + y


def twice(model, x):
    return model.layer(model.layer(x) * model.c) * model.c


@pytest.mark.parametrize(
    ("combine", "constant", "reasons"),
    [
        (both, PER_CHANNEL, []),
        (
            twice,
            PER_CHANNEL,
            [
                "layer_weight of conv2d is shared with conv2d_1",
                "layer_weight of conv2d_1 is shared with conv2d",
            ],
        ),
        (lambda m, x: m.layer(x) / m.c, torch.zeros(4), ["a factor or term is not finite"]),
    ],
    ids=["two readers", "shared weight", "zero divisor"],
)
def test_fold_affines_when_the_layer_must_stay_then_left_with_the_reason(
    program, combine, constant, reasons
):
    p = program(Behind(conv, constant.view(4, 1, 1), combine), (IMAGE,))
    result = fold_affines(p.gm)
    assert not result.changed
    assert [note.text for note in result.notes if note.skipped] == reasons


def test_fold_affines_when_a_batch_norm_was_folded_then_its_moments_follow(program, settled):
    model = settled(nn.Sequential(conv(), nn.BatchNorm2d(4)), IMAGE)
    model.append(Behind(nn.Identity, PER_CHANNEL.view(4, 1, 1), lambda m, x: x * m.c - m.c))
    p = program(model, (IMAGE,)).apply(fold_batch_norm, fold_affines)
    (node,) = (n for n in p.gm.graph.nodes if n.name == "conv2d")
    found, norm = node.meta[OUTPUT_MOMENTS_KEY], model[1]
    torch.testing.assert_close(found.mean.float(), norm.bias.detach() * PER_CHANNEL - PER_CHANNEL)
    expected = norm.weight.detach().abs() * PER_CHANNEL.abs()
    torch.testing.assert_close(found.deviation.float(), expected)


@pytest.mark.parametrize("recipe", ["xnnpack int8", "onnx int8", "cpu int8"])
def test_prepare_when_norms_are_frozen_then_integers_have_layers_and_clips_alone(
    recipe, unmeasured
):
    backend, name = recipe.split()
    model = frozen_net()[:6]
    program = torch.export.export(model, (IMAGE,))
    prepared = pq.prepare_pt2e(program, pq.backends.get(backend).quantizer(name))
    gm = pq.convert_pt2e(pq.calibrate(prepared, [(IMAGE,)], progress=False))
    computed = [
        n.name
        for n in gm.graph.nodes
        if n.op == "call_function" and "quantize" not in n.name and n.name != "_guards_fn"
    ]
    assert computed == ["conv2d", "relu", "conv2d_1", "relu_1"]
    assert pq.sqnr_db(model(IMAGE), gm(IMAGE)) > 25


def test_prepare_when_for_training_then_the_weight_that_trains_is_the_models():
    model = frozen_net()[:3]
    program = torch.export.export(model, (IMAGE,))
    prepared = pq.prepare_qat_pt2e(program, pq.backends.get("xnnpack").quantizer("int8"))
    weight = next(v for k, v in prepared.state_dict().items() if k == "0.weight")
    assert torch.equal(weight, model[0].weight)


def test_fold_affines_when_a_computed_weight_has_a_dynamic_size_then_left():
    class Scores(nn.Module):
        def forward(self, x):
            return nn.functional.linear(x, x) * 2

    rows = {0: torch.export.Dim("rows", min=2, max=8)}
    program = torch.export.export(Scores(), (IMAGE[0, 0],), dynamic_shapes=(rows,))
    (record,) = run_passes(program.module(check_guards=False), (fold_affines,))
    assert not record.changed
