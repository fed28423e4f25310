"""Runs of a prepared graph with something else in the place of its observers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, log10, sqrt
from statistics import pstdev
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from pt2e_quant.core.qparams import QParams
from pt2e_quant.graph.alias import mutated_buffers
from pt2e_quant.graph.ops import CONV, LINEAR, argument, arguments, is_call

MOST_ROWS = 16
"""Of the outputs of a linear or convolution, how many are computed again."""


class ObservedRun(Interpreter):
    """Runs a prepared graph with something else in the place of its observers."""

    def __init__(self, gm: GraphModule, observe: Callable[[Node, Any], Any]) -> None:
        super().__init__(gm, garbage_collect_values=True)
        self.observe = observe
        self.written = frozenset(mutated_buffers(gm))
        self.after: Callable[[Node, Any], None] = ignore

    def call(self, inputs: Sequence[Any]) -> list[Any]:
        """The flat outputs of one call, which starts from the state that the model has."""
        given = pytree.tree_map_only(Tensor, Tensor.clone, tuple(inputs))
        return pytree.tree_leaves(self.run(*given, enable_io_processing=False))

    def run_node(self, n: Node) -> Any:
        """Run one node; an observer hands on what `observe` makes of its input."""
        if n.op == "call_module":
            return self.observe(n, self.env[n.all_input_nodes[0]])
        value = super().run_node(n)
        if n.op == "get_attr" and str(n.target) in self.written:
            return value.clone()
        self.after(n, value)
        return value

    def again(self, node: Node, source: Node, value: Tensor) -> Any:
        """What an operator computes of another value of one of its inputs.

        Of a linear or convolution with many outputs some are computed, at even distances.
        """

        def read(n: Node) -> Any:
            return value if n is source else self.env[n]

        given = {name: _filled(value, read) for name, value in arguments(node).items()}
        if is_call(node, LINEAR) or (is_call(node, CONV) and argument(node, "groups") == 1):
            step = max(1, len(given["weight"]) // MOST_ROWS)
            sampled = {name: given[name] for name in ("weight", "bias")}
            given |= {name: v if v is None else v[::step] for name, v in sampled.items()}
        return node.target(**given)  # type: ignore[operator]  # an operator


def _filled(given: Any, read: Callable[[Node], Any]) -> Any:
    """Arguments with values for nodes, in plain lists: operators refuse torch.fx's own."""
    if isinstance(given, Node):
        return read(given)
    if isinstance(given, Mapping):
        return {key: _filled(value, read) for key, value in given.items()}
    if isinstance(given, (list, tuple)):
        made = [_filled(value, read) for value in given]
        return made if isinstance(given, list) else tuple(made)
    return given


@dataclass(slots=True)
class OutputError:
    """The error of a model's outputs, call by call.

    Args:
        signals: the energy of what the float model makes of each call, weighted.
        noises: that of the difference.
    """

    signals: list[float] = field(default_factory=list)
    noises: list[float] = field(default_factory=list)

    def add(self, expected: Sequence[Tensor], found: Sequence[Tensor], weight: float) -> None:
        """Add a call."""
        self.signals.append(weight * sum(map(energy, expected)))
        differences = (f - e for f, e in zip(found, expected, strict=True))
        self.noises.append(weight * sum(map(energy, differences)))

    def __add__(self, other: "OutputError") -> "OutputError":
        return OutputError(self.signals + other.signals, self.noises + other.noises)

    @property
    def db(self) -> float:
        """The signal to noise ratio of all calls together."""
        signal, noise = sum(self.signals), sum(self.noises)
        return 10 * log10(signal / noise) if noise > 0 < signal else inf

    def sure_gain(self, other: "OutputError") -> float:
        """By how many dB this error of the same calls is less, minus one standard error of that.

        The standard error is that of leaving out one call each time (jackknife): a gain that one
        call makes or takes away is none to rely on.
        """
        own, others = sum(self.noises), sum(other.noises)
        if not own > 0 < others:
            return 0.0
        left_out = [
            10 * log10(max(others - b, 1e-30) / max(own - a, 1e-30))
            for a, b in zip(self.noises, other.noises, strict=True)
        ]
        spread = pstdev(left_out) * sqrt(len(left_out) - 1)
        return 10 * log10(others / own) - spread


def ignore(node: Node, value: Any) -> None:
    """Nothing is to be measured behind a node."""


def is_float(value: object) -> bool:
    """Whether a value is a tensor of floats."""
    return isinstance(value, Tensor) and value.is_floating_point()


def floats(values: Iterable[Any]) -> list[Tensor]:
    """Those of some values that are tensors of floats."""
    return [value for value in values if is_float(value)]


def energy(value: Tensor) -> float:
    """The sum of the squares."""
    return float(torch.linalg.vector_norm(value.float()).item()) ** 2


def rounded_by(qparams: QParams, value: Tensor) -> Tensor:
    """A tensor rounded by one scale: torch's fake-quantize, in a tenth of its time."""
    scale, zero_point = float(qparams.scale), int(qparams.zero_point)
    ends = qparams.quant_min - zero_point, qparams.quant_max - zero_point
    steps = value.float().mul(1 / scale).round_().clamp_(*ends)
    return steps.mul_(scale).to(value.dtype)
