"""The calls that an artifact is checked with, and the canonical graph's results of each."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pt2e_quant.backends.compare_results import Results, name_results
from pt2e_quant.backends.rounding_noise import (
    ShiftedInterpreter,
    run_with_flipped_steps,
    run_with_moved_steps,
    run_with_rounding_noise,
)
from pt2e_quant.backends.run_calls import state_results
from pt2e_quant.backends.sample_run import copied_leaves
from pt2e_quant.backends.trial_data import fresh_call
from pt2e_quant.backends.trial_sizes import Sizes, Work, plan_sizes, sizes_of
from pt2e_quant.core.capture import Capture
from pt2e_quant.core.inexact import is_inexact
from pt2e_quant.core.one_thread import one_thread
from pt2e_quant.core.qdq import QUANTIZE_OPS, required_attribute
from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.flow.calibrate.calibrate import preserve_buffers
from pt2e_quant.flow.calibrate.input_ranges import input_ranges
from pt2e_quant.flow.calibrate.sample import Sample


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trial:
    """One call.

    Args:
        label: for errors, "" for the sample's own.
        leaves: the inputs in placeholder order.
        results: what the canonical graph gave.
    """

    label: str
    leaves: tuple[Any, ...]
    results: Results


class Trials:
    """Calls one after another, the sample first; buffers keep from call to call what they hold.

    Args:
        gm: the canonical graph; it is as before afterwards.
        sample: the first call.
        capture: of the artifact, whose sizes may be fewer than the graph's.
    """

    def __init__(self, gm: GraphModule, sample: Sample, capture: Capture) -> None:
        self.gm = gm
        self.trials: list[Trial] = []
        self.skipped: list[str] = []
        """The calls that the graph itself refused, with its errors."""
        start = time.perf_counter()
        with _as_it_was(gm):
            for label, variants in _planned(gm, sample, capture):
                self._add(label, variants)
        self.seconds = time.perf_counter() - start
        """The time of the graph for all calls, in seconds."""

    def _add(self, label: str, variants: Sequence[Sequence[Any]]) -> None:
        """Run the first variant of a call that the graph takes."""
        refusal = ""
        for leaves in variants:
            kept = state_of(self.gm)
            watch = _NanWatch()
            try:
                with watch:
                    results = _run(self.gm, leaves, _plain_call(self.gm))
            except Exception as error:  # Whatever the graph raises: it does not take this call.
                if not self.trials:
                    raise
                what = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                refusal = refusal or f"the graph itself stops there: {what}"
            else:
                if self.trials and (other := other_rank(self.gm, results)):
                    refusal = refusal or f"the graph itself stops there: {other}"
                elif self.trials and _lacks(results, self.trials[0].results):
                    refusal = refusal or "the graph gives a tensor without elements there"
                elif self.trials and watch.has_seen:
                    refusal = refusal or "the graph quantizes NaN there"
                elif not self.trials or not any(_has_nan(value) for value in results.values()):
                    trial = Trial(label=label, leaves=tuple(leaves), results=results)
                    self.trials.append(trial)
                    return
            _restore(self.gm, kept)
        if refusal:
            self.skipped.append(f"{label} is not checked: {refusal}")

    def noisy(self, at: int, draw: int) -> Results:
        """The graph's results with rounding noise, also in earlier calls if it has state."""
        return self._again(at, partial(run_with_rounding_noise, self.gm, draw=draw))

    def moved(self, at: int, draw: int) -> Results:
        """The results of a call with quantized integers moved by a step."""
        return self._again(at, partial(run_with_moved_steps, self.gm, draw=draw))

    def flipped(self, at: int, draw: int) -> Results:
        """The results of a call with flipped steps."""
        return self._again(at, partial(run_with_flipped_steps, self.gm, draw=draw))

    def shifted(self, at: int, place: Node, by: float) -> Results:
        """The graph's results if a number is added to the value of a node."""
        run = ShiftedInterpreter(self.gm, place, by).run
        return self._again(at, partial(run, enable_io_processing=False))

    def _again(self, at: int, call: Callable[..., Any]) -> Results:
        first = 0 if capture_of(self.gm).mutated_buffers else at
        with _as_it_was(self.gm):
            found = [_run(self.gm, trial.leaves, call) for trial in self.trials[first : at + 1]]
        return found[-1]


def other_rank(gm: GraphModule, results: Mapping[str, Any]) -> str:
    """Name the result that has another number of dimensions than was captured; "" if none has.

    A squeeze of all dimensions removes one more where a dynamic size is 1: no program with fixed
    ranks can.
    """
    outputs = pytree.tree_leaves(gm.graph.output_node().args[0], is_leaf=lambda v: v is None)
    if len(outputs) > len(results):
        return ""
    for node, (name, found) in zip(outputs, results.items(), strict=False):
        expected = node.meta.get("val") if isinstance(node, Node) else None
        if isinstance(expected, Tensor) and isinstance(found, Tensor):
            if expected.dim() != found.dim():
                return f"{name} has {found.dim()} dimensions, {expected.dim()} were captured"
    return ""


def _planned(
    gm: GraphModule, sample: Sample, capture: Capture
) -> Iterator[tuple[str, list[Sequence[Any]]]]:
    """A label for each call, and its leaves: with noise, and without should the graph refuse it."""
    yield "", [sample.leaves]
    known = sizes_of(capture, sample.leaves)
    plan: Sequence[Sizes] = [] if known is None else plan_sizes(capture, Work(gm), known)
    ranges = input_ranges(gm, sample.leaves)
    for seed, sizes in enumerate(plan, start=1):
        make = partial(fresh_call, capture, sample.leaves, ranges, sizes, seed)
        made = [make(is_mixed=is_mixed) for is_mixed in (True, False)]
        variants: list[Sequence[Any]] = [leaves for leaves in made if leaves is not None]
        if variants:
            yield _label(capture, variants[0]), variants


def _label(capture: Capture, leaves: Sequence[Any]) -> str:
    shown = [
        f"{info.path} {list(leaf.shape)}" if isinstance(leaf, Tensor) else f"{info.path} {leaf}"
        for info, leaf in zip(capture.inputs, leaves, strict=True)
        if isinstance(leaf, Tensor) or info.value is not None
    ]
    return ", ".join(shown[:4]) + (", …" if len(shown) > 4 else "")


class _NanWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Sees whether a quantize reads NaN: each runtime makes another integer of it.

    Control flow runs its bodies outside of the mode: what they quantize is not seen.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.has_seen = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator; look at what it reads if it is a quantize."""
        if func in QUANTIZE_OPS:
            self.has_seen |= bool(args[0].isnan().any())
        return func(*args, **(kwargs or {}))


def _plain_call(gm: GraphModule) -> Callable[..., Any]:
    capture = capture_of(gm)
    return lambda *leaves: gm(*capture.positional(leaves))


def _run(gm: GraphModule, leaves: Sequence[Any], call: Callable[..., Any]) -> dict[str, Any]:
    capture = capture_of(gm)
    found = copied_leaves(
        pytree.tree_leaves(call(*copied_leaves(leaves)), is_leaf=lambda value: value is None)
    )
    return name_results(capture, found) | state_results(state_of(gm))


def state_of(gm: GraphModule) -> dict[str, Tensor]:
    """Copies of the buffers that a call of a graph writes."""
    names = capture_of(gm).mutated_buffers
    return {name: required_attribute(gm, name).detach().clone() for name in names}


def _restore(gm: GraphModule, state: dict[str, Tensor]) -> None:
    for name, value in state.items():
        required_attribute(gm, name).copy_(value)


def _lacks(results: Results, usual: Results) -> bool:
    """True if a result has no elements that has some in the first call."""
    empty = (
        name for name, value in results.items() if isinstance(value, Tensor) and not value.numel()
    )
    return any(name in usual and usual[name].numel() for name in empty)


def _has_nan(value: Any) -> bool:
    return is_inexact(value) and bool(value.isnan().any())


@contextmanager
def _as_it_was(gm: GraphModule) -> Iterator[None]:
    """Run a graph on one thread, and restore its buffers after the block."""
    with torch.no_grad(), one_thread(), preserve_buffers(gm, capture_of(gm)):
        yield
