"""Fake-quantizes against torch.ao's and torchao's: equal to the last bit, forward and backward."""

import copy
import pickle

import pytest
import torch
from torch.ao.quantization import fake_quantize as torch_ao

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.qparams import QParams, fake_quantize
from pt2e_quant.observers.static.minmax import MinMaxObserver
from pt2e_quant.observers.static.moving_average import (
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
)
from pt2e_quant.observers.training import fake_quantize as module
from pt2e_quant.observers.training.fake_quantize import FakeQuantize
from pt2e_quant.observers.training.fixed_fake_quantize import FixedQParamsFakeQuantize
from pt2e_quant.observers.training.fused_fake_quantize import FusedMovingAvgObsFakeQuantize
from pt2e_quant.observers.training.learnable_fake_quantize import (
    LearnableFakeQuantize,
    disable_range_learning,
    enable_range_learning,
)
from pt2e_quant.pt2e import fake_quantize as defaults

theirs = pytest.importorskip("torchao.quantization.pt2e.fake_quantize")
their_learnable = pytest.importorskip("torchao.quantization.pt2e.learnable_fake_quantize")
their_observer = pytest.importorskip("torchao.quantization.pt2e.observer")

# The constructors: the classes and switches of the same file have tests of their own.
NAMES = [
    name
    for name in defaults.__all__
    if name.startswith(("default_", "fused_")) and "affine_fake" not in name and "axis" not in name
]
NAMES.remove("default_groupwise_fake_quant")


def batches(count=4, shape=(6, 5)):
    generator = torch.Generator().manual_seed(0)
    for i in range(count):
        yield torch.randn(shape, generator=generator) * (1 + i)


# default_fake_quant and default_histogram_fake_quant ask for it; both libraries warn.
pytestmark = pytest.mark.filterwarnings(
    "ignore:reduce_range is deprecated", "ignore:Please use quant_min and quant_max to specify"
)


def same(a, b):
    return torch.equal(a.double(), b.double())


@pytest.mark.parametrize("library", [torch_ao, theirs])
@pytest.mark.parametrize("name", NAMES)
def test_default_when_trained_then_equal_to_upstream(name, library):
    ours, other = getattr(defaults, name)(), getattr(library, name)()
    for step, batch in enumerate(batches()):
        if step == 2:
            other.apply(library.disable_observer)
            ours.apply(module.disable_observer)
        x, y = batch.clone().requires_grad_(), batch.clone().requires_grad_()
        ours(x).square().sum().backward()
        other(y).square().sum().backward()
        assert torch.equal(x.grad, y.grad)
        assert torch.equal(ours(batch), other(batch))
    assert list(ours.state_dict()) == list(other.state_dict())
    assert all(same(a, other.state_dict()[k]) for k, a in ours.state_dict().items())
    for a, b in zip(ours.calculate_qparams(), other.calculate_qparams(), strict=True):
        assert same(a, b)


@pytest.mark.parametrize("kind", [FakeQuantize, FusedMovingAvgObsFakeQuantize])
@pytest.mark.parametrize(
    "observer", [MovingAverageMinMaxObserver, MovingAveragePerChannelMinMaxObserver]
)
def test_output_when_evaluated_then_what_q_dq_with_its_qparams_gives(kind, observer):
    per_channel = "Channel" in observer.__name__
    qscheme = torch.per_channel_symmetric if per_channel else torch.per_tensor_affine
    low = -127 if per_channel else -128
    made = kind(observer, quant_min=low, quant_max=127, dtype=torch.int8, qscheme=qscheme)
    for batch in batches():
        made(batch)
    made.disable_observer()
    # Not calculate_qparams: torch's fused operator trains with another symmetric scale.
    scale, zero_point = made.scale, made.zero_point
    qp = QParams(
        scale=scale,
        zero_point=zero_point.to(torch.int32),
        quant_min=low,
        quant_max=127,
        dtype=torch.int8,
        axis=0 if per_channel else None,
    )
    x = next(batches())
    assert torch.equal(made(x), fake_quantize(x, qp))


def test_flags_when_both_are_off_then_a_pass_through():
    made = FakeQuantize(MinMaxObserver, dtype=torch.int8)
    assert not made.seen
    made.apply(module.disable_fake_quant)
    made.apply(module.disable_observer)
    x = torch.ones(2)
    assert made(x) is x
    assert not made.seen
    made.apply(module.enable_observer)
    assert made(x) is x
    assert made.seen
    made.apply(module.enable_fake_quant)
    assert made(x) is not x


@pytest.mark.parametrize("kind", [FakeQuantize, FusedMovingAvgObsFakeQuantize])
def test_state_when_per_channel_then_loads_into_a_fresh_one_and_copies(kind):
    def make():
        return kind(
            MovingAveragePerChannelMinMaxObserver,
            quant_min=-127,
            quant_max=127,
            dtype=torch.int8,
            qscheme=torch.per_channel_symmetric,
        )

    trained, fresh = make(), make()
    for batch in batches():
        trained(batch)
    fresh.load_state_dict(trained.state_dict())
    x = next(batches())
    fresh.disable_observer()
    expected = fresh(x)
    trained.disable_observer()
    for other in (trained, copy.deepcopy(trained), pickle.loads(pickle.dumps(trained))):
        assert torch.equal(other(x), expected)


def test_fixed_when_trained_then_its_qparams_stay():
    made = defaults.default_fixed_qparams_range_0to1_fake_quant()
    made(torch.randn(3) * 100)
    assert made.scale.item() == 1 / 256
    with pytest.raises(ConfigError, match="FixedQParamsObserver"):
        FixedQParamsFakeQuantize(MinMaxObserver)


def test_fused_when_the_observer_has_no_average_then_refused():
    with pytest.raises(ConfigError, match="moving-average"):
        FusedMovingAvgObsFakeQuantize(MinMaxObserver)


@pytest.mark.parametrize(("low", "high"), [(-129, 127), (5, 4), (0, 255)])
def test_range_when_it_does_not_fit_then_refused(low, high):
    with pytest.raises(ConfigError, match="range"):
        FakeQuantize(MinMaxObserver, quant_min=low, quant_max=high, dtype=torch.int8)
    with pytest.raises(ConfigError, match="range"):
        FakeQuantize(MinMaxObserver.with_args(dtype=torch.int8), quant_min=low, quant_max=high)


LEARNABLE = [
    ("MovingAverageMinMaxObserver", {"qscheme": torch.per_tensor_affine}),
    ("MovingAverageMinMaxObserver", {"qscheme": torch.per_tensor_symmetric}),
    ("MovingAveragePerChannelMinMaxObserver", {"qscheme": torch.per_channel_symmetric}),
    ("MovingAveragePerChannelMinMaxObserver", {"qscheme": torch.per_channel_affine}),
]


@pytest.mark.parametrize(("observer", "kwargs"), LEARNABLE)
@pytest.mark.parametrize("scaled", [False, True])
def test_learnable_when_trained_then_equal_to_torchao(observer, kwargs, scaled):
    kwargs = {**kwargs, "dtype": torch.int8, "quant_min": -8, "quant_max": 7}
    ours = LearnableFakeQuantize(globals()[observer], use_grad_scaling=scaled, **kwargs)
    other = their_learnable.LearnableFakeQuantize(
        getattr(their_observer, observer), use_grad_scaling=scaled, **kwargs
    )
    assert not ours.seen
    with pytest.raises(ConfigError, match="no data"):
        ours.calculate_qparams()
    for step, batch in enumerate(batches()):
        if step == 2:
            ours.apply(enable_range_learning)
            other.apply(their_learnable.enable_range_learning)
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (ours, other)]
        x, y = batch.clone().requires_grad_(), batch.clone().requires_grad_()
        ours(x).square().sum().backward()
        other(y).square().sum().backward()
        assert torch.equal(x.grad, y.grad)
        if step >= 2:
            assert torch.equal(ours.scale.grad, other.scale.grad)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert torch.equal(ours.scale, other.scale)
    for a, b in zip(ours.calculate_qparams(), other.calculate_qparams(), strict=True):
        assert torch.equal(a, b)
    assert set(ours.state_dict()) == set(other.state_dict())


def test_learnable_when_loaded_before_any_data_then_as_trained():
    def make():
        return LearnableFakeQuantize(MovingAverageMinMaxObserver, dtype=torch.quint8)

    trained, fresh = make(), make()
    for batch in batches():
        trained(batch)
    trained.apply(enable_range_learning)
    fresh.load_state_dict(trained.state_dict())
    assert fresh.seen
    x = next(batches())
    assert torch.equal(fresh(x), trained(x))
    fresh.apply(disable_range_learning)
    assert not fresh.scale.requires_grad


def test_learnable_when_it_observes_again_then_it_stops_learning():
    made = LearnableFakeQuantize(MovingAverageMinMaxObserver, dtype=torch.quint8)
    made(torch.randn(3))
    made.enable_range_learning()
    assert made.observer_enabled.item() == 0
    made.enable_observer()
    assert made.learning_enabled.item() == 0
