"""A sample of what the inputs of a graph were in calibration, for algorithms that run it again."""

import copy
import math
import random
from typing import Any, Self

import torch
from torch import Tensor, nn

from pt2e_quant.observers.statistics.base import Statistics

MOST_CALLS = 16
"""Calls that are kept of all that calibration makes, drawn at random."""
MOST_LARGEST = 4
"""Calls that are kept beside them, because their inputs are the largest of all."""


MOST_BYTES = 2**29
"""The most bytes of the sample; of larger calls fewer are kept."""


class KeptCalls(nn.Module):
    """Calls that are kept, whole: one choice for all inputs of a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.room = MOST_CALLS
        """The number of calls, of the first one's size, that the sample has room for."""
        self.width = 0
        """The number of inputs of a call."""
        self.sample: list[list[Any]] = []
        """A seeded random sample of the calls."""
        self.places: list[int] = []
        """Their numbers."""
        self.largest: list[list[Any]] = []
        """The calls whose inputs have the largest root mean square."""
        self.sizes: list[tuple[float, int]] = []
        """Their root mean squares and numbers."""
        self.given: dict[int, Any] = {}

    def take(self, place: int, x: Any) -> None:
        """Take an input of a call; the last one decides whether the call is kept."""
        if place in self.given:  # the call before stopped
            self.given = {}
        self.given[place] = x
        if len(self.given) == self.width:
            given, self.given = self.given, {}
            self._keep([given[index] for index in range(self.width)])

    def _keep(self, call: list[Any]) -> None:
        number, place = self.count, self.count
        self.count += 1
        if number == 0:
            taken = sum(x.nbytes for x in call if isinstance(x, Tensor))
            self.room = max(1, min(MOST_CALLS, MOST_BYTES // max(1, taken)))
        if place >= self.room:  # algorithm R of Vitter 1985, by a generator of each call's own
            place = random.Random(number).randrange(number + 1)
        if place < self.room:
            self.places[place : place + 1] = [number]
            self.sample[place : place + 1] = [[_copied(x) for x in call]]
        size = max(map(_size, call), default=0.0)
        place = len(self.sizes)
        if place == -(-MOST_LARGEST * self.room // MOST_CALLS):
            place = min(range(place), key=self.sizes.__getitem__)
            if size <= self.sizes[place][0]:
                return
        self.sizes[place : place + 1] = [(size, number)]
        self.largest[place : place + 1] = [[_copied(x) for x in call]]


class KeptInputs(Statistics):
    """Keeps what one input of the graph was in some of the calls.

    Args:
        calls: what chooses the calls, shared by the inputs of a graph.
    """

    def __init__(self, calls: KeptCalls) -> None:
        super().__init__()
        self.calls = calls
        self.place = calls.width
        calls.width += 1

    @property
    def kept(self) -> list[Any]:
        """The values of this input in the random sample of the calls."""
        return [call[self.place] for call in self.calls.sample]

    def forward(self, x: Any) -> Any:
        """Keep x, or not; returns x, which may be no tensor."""
        self.calls.take(self.place, x)
        return x

    @property
    def seen(self) -> bool:
        """True if any call has come."""
        return self.calls.count > 0

    @property
    def is_finite(self) -> bool:
        """True if no NaN is in what is kept; inputs may be masks of -inf."""
        floats = (x for x in self.kept if isinstance(x, Tensor) and x.is_floating_point())
        return not any(bool(x.isnan().any()) for x in floats)

    def scaled(self, factors: Tensor) -> Self:
        """A copy, not scaled: callers give the inputs of a graph."""
        return copy.copy(self)


def _copied(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, Tensor) else x


def _size(x: Any) -> float:
    if not isinstance(x, Tensor) or not x.is_floating_point() or not x.numel():
        return 0.0
    return float(torch.linalg.vector_norm(x.detach().float()).item()) / math.sqrt(x.numel())
