"""Runs of a prepared graph with something else in the place of its observers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, log10, sqrt
from statistics import fmean, pstdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from pt2e_quant.core.inexact import as_reals, is_inexact
from pt2e_quant.core.progress import show_progress
from pt2e_quant.core.qparams import QParams
from pt2e_quant.graph.alias import mutated_buffers
from pt2e_quant.graph.meta import attribute
from pt2e_quant.graph.ops import CONV, LINEAR, argument, arguments, is_call
from pt2e_quant.observers.rounding import rounded
from pt2e_quant.passes.algorithms.paired_run import fixed_nodes
from pt2e_quant.passes.recurrent.round_recurrent import as_rounded

MOST_ROWS = 16
"""The most output channels of a linear or convolution that are computed again."""


class ObservedRun:
    """Runs a prepared graph with something else in the place of its observers.

    `torch.fx.Interpreter` takes 50 us for each node beside its operator, which is most of the time
    that a network of a few ms a call takes. What can be known before the first call is found once.

    Args:
        gm: prepared, without statistics in it; its constants stay while it is run.
        observe: what an observer node makes of its input.
        function: what computes a call of a function; None for its target.
    """

    def __init__(
        self,
        gm: GraphModule,
        observe: Callable[[Node, Any], Any],
        function: Callable[[Node], Callable[..., Any]] | None = None,
    ) -> None:
        self.observe = observe
        self.env: dict[Node, Any] = {}
        """The values that are still to be read."""
        self.after: Callable[[Node, Any], None] = ignore
        written = frozenset(mutated_buffers(gm))
        nodes = list(gm.graph.nodes)
        constants = [n for n in nodes if n.op == "get_attr"]
        self.constants = {n: attribute(gm, str(n.target)) for n in constants}
        """The value of each constant in the runs."""
        self._written = [n for n in constants if str(n.target) in written]
        self._inputs = [n for n in nodes if n.op == "placeholder"]
        self._steps = [(n, *_how_called(n, function)) for n in nodes if n.op.startswith("call_")]
        (self._output,) = (n for n in nodes if n.op == "output")
        last = {node: node for node in nodes}
        last.update((source, node) for node in nodes for source in node.all_input_nodes)
        self._done: dict[Node, list[Node]] = {}
        for source, node in last.items():
            if source.op.startswith("call_") and node is not self._output:
                self._done.setdefault(node, []).append(source)

    def call(self, inputs: Sequence[Any]) -> list[Any]:
        """The flat outputs of one call, which starts from the state that the model has."""
        env = self.env = dict(self.constants)
        env.update((node, env[node].clone()) for node in self._written)
        given = pytree.tree_map_only(Tensor, Tensor.clone, tuple(inputs))
        env.update(zip(self._inputs, given, strict=True))
        for node, compute, args, kwargs in self._steps:
            if compute is None:
                env[node] = self.observe(node, env[args[0]])
            else:
                value = env[node] = compute(
                    *map_arg(args, env.__getitem__), **map_arg(kwargs, env.__getitem__)
                )
                self.after(node, value)
            for source in self._done.get(node, ()):
                del env[source]
        return pytree.tree_leaves(map_arg(self._output.args[0], env.__getitem__))

    def again(self, node: Node, source: Node, value: Tensor) -> Any:
        """The result of an operator if one of its inputs had another value.

        Of a linear or convolution with many outputs some are computed, at even distances.
        """

        def read(n: Node) -> Any:
            return value if n is source else self.env[n]

        given = {name: filled(value, read) for name, value in arguments(node).items()}
        if is_call(node, LINEAR) or (is_call(node, CONV) and argument(node, "groups") == 1):
            step = max(1, len(given["weight"]) // MOST_ROWS)
            sampled = {name: given[name] for name in ("weight", "bias")}
            given |= {name: v if v is None else v[::step] for name, v in sampled.items()}
        return node.target(**given)  # type: ignore[operator]  # an operator


def _how_called(
    node: Node, function: Callable[[Node], Callable[..., Any]] | None
) -> tuple[Callable[..., Any] | None, Any, dict[str, Any]]:
    """The function that computes a node (None for an observer), and its arguments."""
    if node.op == "call_module":
        return None, tuple(node.all_input_nodes), {}
    assert callable(node.target)  # exported graphs call functions
    compute = node.target if function is None else function(node)
    return compute, node.args, dict(node.kwargs)


def filled(given: Any, read: Callable[[Node], Any]) -> Any:
    """Arguments with values for nodes, in plain lists: operators refuse torch.fx's own."""
    if isinstance(given, Node):
        return read(given)
    if isinstance(given, Mapping):
        return {key: filled(value, read) for key, value in given.items()}
    if isinstance(given, (list, tuple)):
        made = [filled(value, read) for value in given]
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
        """Add a call; a result whose size the values decide and which has another is all noise."""
        self.signals.append(weight * sum(map(energy, expected)))
        differences = (
            f - e if f.shape == e.shape else e for f, e in zip(found, expected, strict=True)
        )
        self.noises.append(weight * sum(map(energy, differences)))

    def __add__(self, other: "OutputError") -> "OutputError":
        return OutputError(self.signals + other.signals, self.noises + other.noises)

    @property
    def db(self) -> float:
        """The signal to noise ratio of all calls together."""
        signal, noise = sum(self.signals), sum(self.noises)
        return 10 * log10(signal / noise) if noise > 0 < signal else inf

    def gain_in_calls(self, other: "OutputError", errors: float = 0.0) -> float:
        """By how many dB this error of the same calls is less, in the mean over the calls.

        Sums of noise are those of a few calls: of which of two choices is better, the mean of the
        calls' ratios tells more.

        Args:
            other: the error of the same calls with another choice.
            errors: how many standard errors of the mean are taken off.
        """
        gains = [
            10 * log10(max(b, 1e-30) / max(a, 1e-30))
            for a, b in zip(self.noises, other.noises, strict=True)
        ]
        return fmean(gains) - errors * pstdev(gains) / sqrt(max(1, len(gains) - 1))

    def sure_gain(self, other: "OutputError", errors: float = 1.0) -> float:
        """By how many dB this error of the same calls is less, minus standard errors of that.

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
        return 10 * log10(others / own) - errors * spread


def exact_run(gm: GraphModule, floats: Mapping[Node, Tensor]) -> ObservedRun:
    """A run of the float model, whose constants are others at some `get_attr` nodes."""
    run = ObservedRun(gm, lambda node, value: value)
    run.constants.update(floats)
    return run


def rounded_run(
    gm: GraphModule, constants: Mapping[Node, Tensor], observers: Mapping[Node, nn.Module]
) -> ObservedRun:
    """A run with all that is quantized rounded, weights once; biases are as good as exact.

    Args:
        gm: prepared and calibrated.
        constants: other values of some `get_attr` nodes.
        observers: others than the graph has, by observer node.
    """
    fixed, known = fixed_nodes(gm.graph), dict[Node, Any]()

    def observe(node: Node, value: Any) -> Any:
        if node in known:
            return known[node]
        made = rounded_as_observed(observers.get(node) or attribute(gm, str(node.target)), value)
        if node in fixed:
            known[node] = made
        return made

    run = ObservedRun(gm, observe, as_rounded)
    run.constants.update(constants)
    return run


def rounded_as_observed(observer: Any, value: Any) -> Any:
    """A value rounded by its observer; biases, whose qparams derive from others, as they are."""
    if not is_float(value) or hasattr(observer, "derive_qparams_fn"):
        return value
    return rounded(observer, value)


def output_errors_of(
    exact: ObservedRun,
    runs: Sequence[ObservedRun],
    calls: Sequence[Sequence[Any]],
    *,
    progress: bool,
) -> list["OutputError"]:
    """Return the output error of each of some runs against the float model over calls.

    Args:
        exact: the float model's.
        runs: those that are compared with it.
        calls: inputs of the model.
        progress: show one.
    """
    errors = [OutputError() for _ in runs]
    for call in show_progress(calls, "confirming weights", enabled=progress):
        expected = floats(exact.call(call))
        for error, run in zip(errors, runs, strict=True):
            error.add(expected, floats(run.call(call)), 1.0)
    return errors


def ignore(node: Node, value: Any) -> None:
    """Nothing is to be measured behind a node."""


def is_float(value: object) -> bool:
    """True if a value is a tensor of floats."""
    return isinstance(value, Tensor) and value.is_floating_point()


def floats(values: Iterable[Any]) -> list[Tensor]:
    """The float tensors among values, and the parts of complex ones."""
    return [as_reals(value) for value in values if is_inexact(value)]


def energy(value: Tensor) -> float:
    """The sum of the squares."""
    return float(torch.linalg.vector_norm(as_reals(value).float()).item()) ** 2


def rounded_by(qparams: QParams, value: Tensor) -> Tensor:
    """A tensor rounded by one scale: torch's fake-quantize, in a tenth of its time."""
    scale, zero_point = float(qparams.scale), int(qparams.zero_point)
    ends = qparams.quant_min - zero_point, qparams.quant_max - zero_point
    steps = value.float().mul(1 / scale).round_().clamp_(*ends)
    return steps.mul_(scale).to(value.dtype)
