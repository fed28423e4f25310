"""A sample of what an input of the graph was in calibration, for algorithms that run it again."""

import copy
import random
from typing import Any, Self

from torch import Tensor

from pt2e_quant.observers.statistics.base import Statistics

MOST_CALLS = 16
"""Calls that are kept of all that calibration makes."""


class KeptInputs(Statistics):
    """Keeps what one input of the graph was in a seeded random sample of the calls.

    Every input of a graph sees every call, so the inputs of one call are at one place of all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.kept: list[Any] = []

    def forward(self, x: Any) -> Any:
        """Keep x, or not; returns x, which may be no tensor."""
        place = self.count  # algorithm R of Vitter 1985, by a generator of each call's own
        if place >= MOST_CALLS:
            place = random.Random(self.count).randrange(self.count + 1)
        self.count += 1
        if place < MOST_CALLS:
            self.kept[place : place + 1] = [x.detach().clone() if isinstance(x, Tensor) else x]
        return x

    @property
    def seen(self) -> bool:
        """Whether any call has come."""
        return self.count > 0

    def scaled(self, factors: Tensor) -> Self:
        """The same: an input of the graph stays what callers give."""
        return copy.copy(self)
