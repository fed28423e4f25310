"""Whether an artifact's results are its graph's, as the gate judges: each output for itself."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from pt2e_quant.backends.gate import rounded_results
from pt2e_quant.backends.judge_results import CEILING_DB, FLOAT_CEILING_DB, FRESH_MARGIN_DB
from pt2e_quant.backends.rounding_noise import (
    DRAWS,
    FLIP_DRAWS,
    bound_with_flips,
    run_with_flipped_steps,
    run_with_moved_steps,
    run_with_rounding_noise,
)
from pt2e_quant.backends.sample_run import run_on_sample
from pt2e_quant.backends.trials import other_rank
from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.flow.calibrate.sample import Sample, sqnr_db

__all__ = ["Expected", "OtherRank", "complaint", "complaint_of_inputs", "expect"]

Run = Callable[..., Any]
"""How a graph is run: as itself, or with noise of a number."""

MARGIN_DB = 6.0
"""As `Backend.lower` has it by default."""

AS_NEAR_DB = 4.0
"""How much further from the float model than the graph a result may be whose roundings add up: as
much noise again as the graph has of its own is 3 dB."""


class OtherRank(Exception):
    """A result has another number of dimensions in this call than was captured: no trial."""


class Expected:
    """What one call should return: of the float model and of the q/dq graph.

    Runs with noise are made where a result is not near enough, with the buffers of that call.

    Args:
        floats: the float model's result.
        graph: the q/dq graph's result.
        inputs: the call's leaves behind it, which the graph may have written.
        draw: the flat result of the graph in one run, given how it is run.
        rounded: for each leaf of the result whether quantization reaches it.
    """

    def __init__(
        self,
        floats: Any,
        graph: Any,
        inputs: list[Any],
        draw: Callable[[Run], list[Any]],
        rounded: Sequence[bool],
    ) -> None:
        self.floats = floats
        self.graph = graph
        self.inputs = inputs
        self.rounded = rounded
        self._draw = draw
        self._drawn: dict[Run, list[list[Any]]] = {}

    def draws(self, run: Run) -> list[list[Any]]:
        """The flat results of the graph with noise."""
        if run not in self._drawn:
            count = FLIP_DRAWS if run is run_with_flipped_steps else DRAWS
            self._drawn[run] = [self._draw(partial(run, draw=draw)) for draw in range(count)]
        return self._drawn[run]


def expect(gm: GraphModule, floats: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Expected:
    """Run the graph once, which may write its buffers, and remember how to run it with noise.

    Raises:
        OtherRank: a squeeze removed a dimension whose size is 1 in this call alone.
    """
    capture = capture_of(gm)
    before = {name: buffer.clone() for name, buffer in gm.named_buffers()}
    leaves = tuple(capture.bind(args, kwargs))
    sample = Sample(leaves=leaves, float_outputs=None)

    def draw(run: Run) -> list[Any]:
        after = {name: buffer.clone() for name, buffer in gm.named_buffers()}
        _write(gm, before)
        found = run_on_sample(gm, sample, partial(run, gm))
        _write(gm, after)
        return found

    with torch.no_grad():
        copies = [v.clone() if isinstance(v, Tensor) else v for v in leaves]
        found = pytree.tree_leaves(gm(*capture.positional(copies)))
    if other := other_rank(gm, {f"result {at}": value for at, value in enumerate(found)}):
        _write(gm, before)  # The artifact is not called either.
        raise OtherRank(other)
    graph = capture.unflatten_output(found)
    return Expected(floats, graph, copies, draw, rounded_results(gm))


def _write(gm: GraphModule, values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in gm.named_buffers():
            buffer.copy_(values[name])


def complaint(expected: Expected, found: Any) -> str | None:
    """What is wrong with a result, None if nothing is."""
    wanted, shape = pytree.tree_flatten(expected.graph)
    leaves, found_shape = pytree.tree_flatten(found)
    if shape != found_shape:
        return f"structure {found_shape}, expected {shape}"
    floats = pytree.tree_leaves(expected.floats)
    for index, (left, right) in enumerate(zip(wanted, leaves, strict=True)):
        text = _leaf_complaint(expected, index, left, right, floats)
        if text is not None:
            return f"output {index}: {text}"
    return None


def complaint_of_inputs(expected: Expected, given: Any) -> str | None:
    """What is wrong with a call's inputs behind it: written otherwise than by the graph."""
    leaves = pytree.tree_leaves(given, is_leaf=lambda v: v is None)
    for index, (left, right) in enumerate(zip(expected.inputs, leaves, strict=True)):
        if isinstance(left, Tensor) and left.is_floating_point():
            ratio = sqnr_db(left, right)
            if ratio < CEILING_DB:
                return f"input {index} was written: SQNR {ratio:.1f} dB to the graph's"
    return None


def _leaf_complaint(
    expected: Expected, index: int, left: Any, right: Any, floats: Sequence[Any]
) -> str | None:
    if not isinstance(left, Tensor):
        return None if left == right else f"{right!r}, expected {left!r}"
    if not isinstance(right, Tensor):
        return f"{type(right).__name__}, expected a tensor"
    if (left.shape, left.dtype) != (right.shape, right.dtype):
        return f"{right.dtype} {tuple(right.shape)}, expected {left.dtype} {tuple(left.shape)}"
    if not left.is_floating_point():
        return _integer_complaint(expected, index, left, right)
    ratio = sqnr_db(left, right)
    to_float = sqnr_db(floats[index], left)
    most = CEILING_DB if expected.rounded[index] else FLOAT_CEILING_DB
    bound = CEILING_DB if math.isnan(to_float) else min(to_float + MARGIN_DB, most)
    if ratio >= bound:
        return None
    noisy = expected.draws(run_with_rounding_noise)
    bound = min(bound, min(sqnr_db(left, draw[index]) for draw in noisy) - FRESH_MARGIN_DB)
    if math.isnan(ratio) or ratio < bound:
        flips = (sqnr_db(left, draw[index]) for draw in expected.draws(run_with_flipped_steps))
        bound = bound_with_flips(bound, ratio, flips)
    if ratio < bound and sqnr_db(floats[index], right) > to_float - AS_NEAR_DB:
        # Where roundings add up, the gate looks at each operator and then accepts as much.
        moved = expected.draws(run_with_moved_steps)
        bound = min(bound, min(sqnr_db(left, draw[index]) for draw in moved) - FRESH_MARGIN_DB)
    return None if ratio >= bound else f"SQNR {ratio:.1f} dB, expected {bound:.1f} dB"


def _integer_complaint(expected: Expected, index: int, left: Tensor, right: Tensor) -> str | None:
    """Integers are exact, but those made of rounded floats flip."""
    wrong = int((left != right).sum())
    if not wrong:
        return None
    flips = [int((left != d[index]).sum()) for d in expected.draws(run_with_flipped_steps)]
    most = int(max(flips) * 10 ** (FRESH_MARGIN_DB / 10))
    text = f"{wrong} of {left.numel()} integers differ, {most} may"
    return text if wrong > most else None
