"""Replace the observers of a table quantizer by fake-quantizes for training."""

import inspect
from dataclasses import replace
from typing import Any

from pt2e_quant.flow.annotate.observer_choice import ObserverChoice
from pt2e_quant.observers.static.moving_average import (
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
)
from pt2e_quant.observers.training.fake_quantize import FakeQuantize
from pt2e_quant.observers.training.fused_fake_quantize import FusedMovingAvgObsFakeQuantize
from pt2e_quant.observers.weights.weight import WeightObserver

QAT_OBSERVERS = ObserverChoice(
    activation=FusedMovingAvgObsFakeQuantize.with_args(observer=MovingAverageMinMaxObserver),
    # The range of the weights as they are: a moving average would lag behind each step. Not the
    # fused operator, whose symmetric scale lets the most negative weight out of -127 .. 127.
    ranged=FakeQuantize.with_args(observer=MovingAverageMinMaxObserver, averaging_constant=1.0),
    ranged_per_channel=FakeQuantize.with_args(
        observer=MovingAveragePerChannelMinMaxObserver, averaging_constant=1.0
    ),
    searched=FakeQuantize.with_args(observer=WeightObserver),
)
"""The fake-quantizes for quantizers that name only observers of calibration."""


def for_training(observers: ObserverChoice) -> ObserverChoice:
    """The same choice with fake-quantizes in the place of observers; those that are stay.

    Scales that are searched for are searched for in each step until observers rest.
    """
    chosen = {
        name: kept
        for name in ("activation", "weight", "weight_per_channel")
        if makes_fake_quantize(kept := getattr(observers, name))
    }
    return replace(QAT_OBSERVERS, search=observers.search, **chosen)


def makes_fake_quantize(constructor: Any) -> bool:
    """True if a constructor makes a fake-quantize, ours or another library's."""
    while not inspect.isclass(constructor):
        inner = getattr(constructor, "p", None) or getattr(constructor, "func", None)
        if inner is None:
            return False
        constructor = inner
    return hasattr(constructor, "disable_fake_quant")
