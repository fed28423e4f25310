"""What convert takes of a fake-quantize is what it quantized by."""

import copy

import pytest
import torch

from pt2e_quant.core.qparams import QParams, fake_quantize
from pt2e_quant.observers.static.derived import DerivedObserverOrFakeQuantize
from pt2e_quant.observers.static.minmax import MinMaxObserver
from pt2e_quant.observers.static.moving_average import (
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
)
from pt2e_quant.observers.training.fake_quantize import FakeQuantize
from pt2e_quant.observers.training.fused_fake_quantize import FusedMovingAvgObsFakeQuantize
from pt2e_quant.observers.training.trained_qparams import (
    TrainedSource,
    is_fake_quantize,
    qparams_of,
    trained_qparams,
)

theirs = pytest.importorskip("torchao.quantization.pt2e.fake_quantize")
their_observers = pytest.importorskip("torchao.quantization.pt2e.observer")

X = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))


def made(kind, per_channel, low=-127, **arguments):
    module = their_observers if kind.__module__.startswith("torchao") else None
    names = ("MovingAverageMinMaxObserver", "MovingAveragePerChannelMinMaxObserver")
    own = (MovingAverageMinMaxObserver, MovingAveragePerChannelMinMaxObserver)
    observer = own[per_channel] if module is None else getattr(module, names[per_channel])
    return kind(
        observer,
        quant_min=low,
        quant_max=127,
        dtype=torch.int8,
        qscheme=torch.per_channel_symmetric if per_channel else torch.per_tensor_symmetric,
        **arguments,
    )


KINDS = [
    FakeQuantize,
    FusedMovingAvgObsFakeQuantize,
    theirs.FakeQuantize,
    theirs.FusedMovingAvgObsFakeQuantize,
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("per_channel", [False, True])
def test_qparams_when_trained_then_those_of_the_next_evaluation(kind, per_channel):
    fq = made(kind, per_channel)
    for factor in (1.0, 3.0, 0.5):
        fq(X * factor)
    fq.disable_observer()
    qparams = qparams_of(fq)
    assert isinstance(qparams, QParams)
    assert torch.equal(fq(X), fake_quantize(X, qparams))


@pytest.mark.parametrize("kind", KINDS[:2])
def test_qparams_when_fake_quantize_was_off_then_the_statistics(kind):
    fq = made(kind, False)
    fq.disable_fake_quant()
    fq(X)
    assert all(
        torch.equal(a, b) for a, b in zip(trained_qparams(fq), fq.calculate_qparams(), strict=True)
    )
    fq.enable_fake_quant()
    fq.disable_observer()
    expected = qparams_of(fq)
    assert torch.equal(fq(X), fake_quantize(X, expected))


def test_qparams_when_a_fused_one_saw_nothing_then_its_first_ones():
    scale, zero_point = trained_qparams(made(FusedMovingAvgObsFakeQuantize, True))
    assert scale.tolist() == [1.0]
    assert zero_point.tolist() == [0]


def test_fake_quantize_when_asked_then_told_from_observers():
    assert is_fake_quantize(made(FakeQuantize, False))
    assert not is_fake_quantize(MinMaxObserver())


def test_derived_when_it_fake_quantizes_then_by_what_its_sources_trained_with():
    sources = [made(FusedMovingAvgObsFakeQuantize, False) for _ in range(2)]
    for source in sources:
        source(X)

    def product(given):
        scales = [g.calculate_qparams()[0] for g in given]
        return scales[0] * scales[1], torch.zeros(1, dtype=torch.int32)

    derived = DerivedObserverOrFakeQuantize(
        torch.int32, [TrainedSource(s) for s in sources], product, qscheme=torch.per_tensor_affine
    )
    assert derived(X) is X
    derived.fake_quantizes = True
    step = sources[0].scale * sources[1].scale
    assert torch.equal(derived(X), (X / step).round() * step)
    assert derived.seen


def test_source_when_copied_then_it_still_reads_through():
    source = made(FakeQuantize, False)
    source(X)
    copied = copy.deepcopy(TrainedSource(source))
    assert copied.source is not source
    assert torch.equal(copied.calculate_qparams()[0], source.scale)
    assert copied.quant_max == 127
