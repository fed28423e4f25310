"""convert after training gives what evaluation gave, to the last bit, whatever was trained."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from qat_nets import WEIGHT, QatQuantizer, settled
from torch import nn

from pt2e_quant.core.canonical import verify_canonical
from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.flow.qat.prepare_qat_pt2e import prepare_qat_pt2e
from pt2e_quant.graph.ops import BATCH_NORM, is_call
from pt2e_quant.observers.static.moving_average import (
    MovingAveragePerChannelMinMaxObserver,
)
from pt2e_quant.observers.training.fake_quantize import FakeQuantize, disable_observer
from pt2e_quant.observers.training.learnable_fake_quantize import LearnableFakeQuantize

CONVS = {
    (1, False): nn.Conv1d,
    (2, False): nn.Conv2d,
    (3, False): nn.Conv3d,
    (1, True): nn.ConvTranspose1d,
    (2, True): nn.ConvTranspose2d,
    (3, True): nn.ConvTranspose3d,
}
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
ACTS = [None, nn.ReLU(), nn.ReLU(inplace=True), nn.ReLU6(), nn.Hardswish(), nn.SiLU(), nn.GELU()]


class Functional(nn.Module):
    """A batch norm written as a function, with tensors of any name."""

    def __init__(self, conv, norm) -> None:
        super().__init__()
        self.conv = conv
        self.gamma, self.beta = norm.weight, norm.bias
        self.register_buffer("mean", norm.running_mean)
        self.register_buffer("var", norm.running_var)
        self.momentum, self.eps = norm.momentum, norm.eps

    def forward(self, x):
        return F.batch_norm(
            self.conv(x),
            self.mean,
            self.var,
            self.gamma,
            self.beta,
            self.training,
            self.momentum,
            self.eps,
        )


@st.composite
def nets(draw):
    rank, transposed = draw(st.sampled_from(sorted(CONVS)))
    groups = draw(st.sampled_from([1, 2, 4]))
    out = groups * draw(st.integers(1, 3))
    torch.manual_seed(draw(st.integers(0, 99)))
    conv = CONVS[rank, transposed](
        4, out, draw(st.integers(1, 3)), groups=groups, bias=draw(st.booleans())
    )
    norm = NORMS[rank](
        out,
        affine=draw(st.booleans()),
        eps=draw(st.sampled_from([1e-5, 1e-3, 0.1])),
        momentum=draw(st.sampled_from([0.1, 0.5])),
    )
    settled(norm)
    pair = Functional(conv, norm) if draw(st.booleans()) else nn.Sequential(conv, norm)
    act = draw(st.sampled_from(ACTS))
    model = nn.Sequential(pair, *([] if act is None else [act]))
    return model.train(draw(st.booleans())), torch.randn(3, 4, *([5] * rank))


def trained(model, x, quantizer=None, steps=2, dynamic_shapes=None):
    ep = torch.export.export(model, (x,), dynamic_shapes=dynamic_shapes)
    prepared = prepare_qat_pt2e(ep, quantizer or QatQuantizer()).train()
    optimizer = torch.optim.SGD(prepared.parameters(), 0.05)
    for step in range(steps):
        optimizer.zero_grad()
        prepared(x + 0.1 * step).square().mean().backward()
        optimizer.step()
    return prepared


def assert_converts_exactly(prepared, x):
    """Convert, and compare with evaluation before; returns the converted graph."""
    prepared.eval()
    prepared.apply(disable_observer)
    expected = prepared(x).detach()
    converted = convert_pt2e(copy.deepcopy(prepared))
    assert torch.equal(converted(x), expected)
    verify_canonical(converted)
    assert torch.equal(prepared(x), expected)
    return converted


@settings(max_examples=40)
@given(nets())
def test_convert_when_conv_and_batch_norm_were_trained_then_exact_and_folded(case):
    model, x = case
    before = copy.deepcopy(model.state_dict())
    prepared = trained(model, x)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    converted = assert_converts_exactly(prepared, x)
    assert not [n for n in converted.graph.nodes if is_call(n, BATCH_NORM)]


@settings(max_examples=15)
@given(st.booleans(), st.booleans(), st.integers(0, 99))
def test_convert_when_linear_and_batch_norm_were_trained_then_exact(bias, affine, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 6, bias=bias), settled(nn.BatchNorm1d(6, affine=affine)))
    x = torch.randn(7, 5)
    converted = assert_converts_exactly(trained(model.train(), x), x)
    assert not [n for n in converted.graph.nodes if is_call(n, BATCH_NORM)]


class Turned(nn.Module):
    """A linear over the last axis, its batch norm over the channels moved to the second."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bn = nn.Linear(5, 6), settled(nn.BatchNorm1d(6))

    def forward(self, x):
        return self.bn(self.linear(x).transpose(1, 2)).relu()


class SharedNorm(nn.Module):
    """One batch norm behind two convs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1, bias=False)
        self.bn = settled(nn.BatchNorm2d(4))

    def forward(self, x):
        return self.bn(self.a(x)).relu() + self.bn(self.b(x))


class SharedConv(nn.Module):
    """One conv in front of two batch norms, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.p, self.q = settled(nn.BatchNorm2d(4)), settled(nn.BatchNorm2d(4), seed=1)

    def forward(self, x):
        return self.p(self.conv(x)).relu(), self.q(self.conv(2 * x))


class Lone(nn.Module):
    """A batch norm of the input, and one whose conv has another reader."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.conv = settled(nn.BatchNorm2d(3)), nn.Conv2d(3, 4, 1)
        self.bn = settled(nn.BatchNorm2d(4))

    def forward(self, x):
        y = self.conv(self.first(x))
        return self.bn(y).relu() + y


class Dropped(nn.Module):
    """Dropouts of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3), settled(nn.BatchNorm2d(4))
        self.spatial, self.plain = nn.Dropout2d(0.2), nn.Dropout(0.4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.plain(self.spatial(self.bn(self.conv(x)).relu()).mean((2, 3))))


IMAGE = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))
ROWS = torch.randn(4, 7, 5, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("net", "x", "norms_left"),
    [
        (Turned, ROWS, 0),
        (SharedNorm, IMAGE, 0),
        (Lone, IMAGE, 2),
        (Dropped, IMAGE, 0),
    ],
)
def test_convert_when_batch_norms_stand_elsewhere_then_exact(net, x, norms_left):
    torch.manual_seed(0)
    converted = assert_converts_exactly(trained(net().train(), x), x)
    assert len([n for n in converted.graph.nodes if is_call(n, BATCH_NORM)]) == norms_left
    assert not [n for n in converted.graph.nodes if "dropout" in str(n.target)]


def test_convert_when_a_conv_has_two_batch_norms_then_two_weights_are_stored():
    torch.manual_seed(0)
    ep = torch.export.export(SharedConv().train(), (IMAGE,))
    prepared = prepare_qat_pt2e(ep, QatQuantizer())
    prepared(IMAGE)
    prepared.eval().apply(disable_observer)
    expected = prepared(IMAGE)
    found = convert_pt2e(prepared)(IMAGE)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_convert_when_in_training_mode_then_as_in_evaluation():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5))
    prepared = trained(model.train(), IMAGE)
    prepared.apply(disable_observer)
    expected = copy.deepcopy(prepared).eval()(IMAGE)
    assert torch.equal(convert_pt2e(prepared)(IMAGE), expected)


def weights(kind, **arguments):
    return kind.with_args(observer=MovingAveragePerChannelMinMaxObserver, **arguments)


@pytest.mark.parametrize(
    ("weight", "weight_range"),
    [
        (weights(FakeQuantize), (-128, 127)),
        # Here torch's fused operator trains with another scale than its observer says.
        (WEIGHT, (-127, 127)),
        (weights(FakeQuantize), (-8, 7)),
        (weights(LearnableFakeQuantize), (-127, 127)),
    ],
)
@pytest.mark.parametrize("observe_to_the_end", [True, False])
def test_convert_when_other_fake_quantizes_then_exact(weight, weight_range, observe_to_the_end):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))
    quantizer = QatQuantizer(weight, weight_range=weight_range)
    prepared = trained(model.train(), IMAGE, quantizer, steps=1)
    if not observe_to_the_end:
        prepared.apply(disable_observer)
    optimizer = torch.optim.SGD(prepared.parameters(), 0.5)
    prepared(IMAGE * 3).square().sum().backward()
    optimizer.step()
    assert_converts_exactly(prepared, IMAGE)


def test_convert_when_gamma_is_zero_then_it_trained_all_the_same():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).train()
    nn.init.zeros_(model[1].weight)
    prepared = prepare_qat_pt2e(torch.export.export(model, (IMAGE,)), QatQuantizer())
    target = torch.randn(4, 4, 4, 4)
    optimizer = torch.optim.SGD(prepared.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (prepared(IMAGE) - target).square().mean().backward()
        optimizer.step()
    gamma = dict(prepared.named_parameters())["1.weight"]
    assert bool((gamma != 0).all())
    assert bool(gamma.isfinite().all())
    assert_converts_exactly(prepared, IMAGE)


def test_convert_when_nothing_was_run_then_the_activations_are_named():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).train()
    prepared = prepare_qat_pt2e(torch.export.export(model, (IMAGE,)), QatQuantizer())
    with pytest.raises(Exception, match="2 of 3 observers saw no data"):
        convert_pt2e(prepared)


def test_shapes_when_dynamic_then_they_stay_so():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    batch = torch.export.Dim("batch", min=2, max=64)
    prepared = trained(model.train(), IMAGE, dynamic_shapes={"input": {0: batch}})
    x = torch.randn(9, 3, 6, 6)
    prepared(x)
    assert_converts_exactly(prepared, x)


def test_prepared_when_moved_between_modes_then_statistics_follow():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=0.3), nn.BatchNorm2d(4))
    prepared = prepare_qat_pt2e(torch.export.export(model.eval(), (IMAGE,)), QatQuantizer())
    assert not prepared.training
    state = lambda: {k: v.clone() for k, v in prepared.state_dict().items() if k[0] in "12"}  # noqa: E731
    start = state()
    prepared(IMAGE)
    assert all(torch.equal(v, start[k]) for k, v in state().items())
    prepared.train()(IMAGE)
    prepared(IMAGE)
    after = state()
    assert after["1.num_batches_tracked"] == after["2.num_batches_tracked"] == 2
    assert not torch.equal(after["1.running_var"], start["1.running_var"])
    assert not torch.equal(after["2.running_mean"], start["2.running_mean"])
    prepared.eval()(IMAGE)
    assert all(torch.equal(v, after[k]) for k, v in state().items())
