"""Every observer and fake-quantize that is offered for training, under `torch.compile`."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import pt2e_quant as pq
from pt2e_quant.core.errors import CalibrationError, Pt2eQuantError
from pt2e_quant.observers.base import ObserverBase
from pt2e_quant.observers.observe_whole import observe_where
from pt2e_quant.observers.qschemes import is_per_channel
from pt2e_quant.observers.static.predicted_range import PredictedRangeObserver
from pt2e_quant.observers.static.rounded_scale import RoundedScaleObserver
from pt2e_quant.observers.training.learnable_fake_quantize import (
    disable_range_learning,
    enable_range_learning,
)
from pt2e_quant.pt2e import fake_quantize as fake_quantizes
from pt2e_quant.pt2e import observer as observers
from pt2e_quant.pt2e.fake_quantize import (
    disable_fake_quant,
    disable_observer,
    enable_fake_quant,
    enable_observer,
)
from tests.parameters import named_subset

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
X = torch.randn(8, 128, generator=torch.Generator().manual_seed(1))
PREPARED = ("PlaceholderObserver",)
"""Observers that gather nothing: convert reads what they say, nothing trains with them."""


def of_observer(kind, **given):
    """A fake-quantize with an observer of the face."""
    return partial(pq.FakeQuantize, kind, **given)


def learned(kind):
    """A fake-quantize that learns, as prepare makes it: with parameters of its size."""
    made = pq.LearnableFakeQuantize(kind)
    made.start_channels(len(X) if is_per_channel(made.qscheme) else 1)
    return made


def offered():
    """Constructors by name: of each fake-quantize, and of each observer in two of them."""
    found = {name: getattr(fake_quantizes, name) for name in fake_quantizes.__all__}
    found = {n: make for n, make in found.items() if n.startswith(("default_", "fused_"))}
    kinds = [getattr(observers, name) for name in observers.__all__]
    kinds += [PredictedRangeObserver, pq.LSQObserver, pq.LSQPlusWeightObserver]
    kinds += [partial(RoundedScaleObserver, kind) for kind in (pq.MSEObserver, pq.MinMaxObserver)]
    for kind in kinds:
        cls = kind.func if isinstance(kind, partial) else kind
        if not (isinstance(cls, type) and issubclass(cls, ObserverBase)):
            continue
        name = cls.__name__ + (f" {kind.args[0].__name__}" if isinstance(kind, partial) else "")
        for of, make in (
            ("FakeQuantize", of_observer(kind)),
            ("Learnable", partial(learned, kind)),
        ):
            try:
                made = make()
            except (TypeError, Pt2eQuantError):
                continue  # refused in eager mode, with the reason
            if cls.__name__ not in PREPARED and made is not None:
                found[f"{of} {name}"] = make
    return found


OFFERED = offered()
ALWAYS = (
    "FakeQuantize EntropyObserver",
    "FakeQuantize HistogramObserver",
    "FakeQuantize LSQObserver",
    "FakeQuantize LSQPlusWeightObserver",
    "FakeQuantize PerChannelMinMaxObserver",
    "FakeQuantize PredictedRangeObserver",
    "FakeQuantize RoundedScaleObserver MSEObserver",
    "Learnable MovingAverageMinMaxObserver",
    "Learnable PercentileObserver",
    "default_affine_per_axis_fake_quant",
    "default_dynamic_fake_quant",
    "default_fixed_qparams_range_0to1_fake_quant",
    "default_fused_per_channel_wt_fake_quant",
    "default_groupwise_fake_quant",
)


def net(make):
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    return nn.Sequential(nn.Linear(128, 128), make(), nn.ReLU(), nn.Linear(128, 4))


def train(run, model, steps=2):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = run(X * (1 + step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


PHASES = (
    (),
    (disable_observer,),
    (enable_range_learning,),
    (disable_range_learning, enable_observer, disable_fake_quant),
    (enable_fake_quant,),
)


@pytest.mark.parametrize("name", named_subset(sorted(OFFERED), *ALWAYS))
def test_offered_observer_when_compiled_then_one_graph_that_trains_as_in_eager(name):
    model = net(OFFERED[name])
    eager = copy.deepcopy(model)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    for phase in PHASES:
        for switch in phase:
            model.apply(switch)
            eager.apply(switch)
        assert train(run, model) == train(eager, eager), phase
        found, expected = model.state_dict(), eager.state_dict()
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert torch.equal(found[key], value), (phase, key)
    assert not counters["graph_break"]


@pytest.mark.parametrize("name", ["HistogramObserver", "MSEObserver", "EntropyObserver"])
def test_observer_by_itself_when_compiled_then_gathers_as_in_eager(name):
    model = net(getattr(observers, name))
    eager = copy.deepcopy(model)
    assert torch._dynamo.explain(copy.deepcopy(model))(X).graph_break_count == 0
    run = torch.compile(model, fullgraph=True)
    for batch in (X, 3 * X, X):
        run(batch), eager(batch)
    assert torch.equal(model[1].histogram.sum(), eager[1].histogram.sum())
    assert model[1].seen


def test_observer_when_code_is_shared_then_each_gathers_its_own():
    made = [nn.Sequential(pq.FakeQuantize(pq.MSEObserver)) for _ in range(2)]
    torch._dynamo.reset()
    run = torch.compile(lambda model, x: model(x), backend="aot_eager", fullgraph=True)
    for model, x in zip((*made, *made), (X, 2 * X, X, 2 * X), strict=True):
        run(model, x)
    for model, x in zip(made, (X, 2 * X), strict=True):
        assert model[0].activation_post_process.max_val == x.max()


def test_observer_when_off_and_compiled_then_looks_at_nothing():
    model = net(of_observer(pq.HistogramObserver))
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    run(X)
    model.apply(disable_observer)
    run(X * torch.inf)  # an observer that looked would refuse it
    model.apply(enable_observer)
    with pytest.raises(CalibrationError, match="NaN or infinity"):
        run(X * torch.inf)


def test_observer_that_resizes_when_no_compiler_follows_it_then_refused_with_the_way_out():
    class Untraced(pq.PerChannelMinMaxObserver):
        is_traceable = False

    torch._dynamo.reset()
    observer = Untraced()

    def observe(x):
        observe_where(observer, x, True)
        return x

    with pytest.raises(CalibrationError, match="run one batch before"):
        torch.compile(observe, backend="aot_eager", fullgraph=True)(X)
    observer(X)
    torch.compile(observe, backend="aot_eager", fullgraph=True)(2 * X)
    assert torch.equal(observer.max_val, 2 * X.amax(1))


def test_learned_range_when_saved_before_the_first_batch_then_begins_with_it():
    made, other = learned(pq.MSEObserver), learned(pq.MSEObserver)
    other(X)
    other.load_state_dict(made.state_dict())
    other.disable_observer()
    assert not other.seen
    other(2 * X)
    made(2 * X)
    assert torch.equal(made.scale, other.scale)
    assert other.seen
