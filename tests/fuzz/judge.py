"""Whether an artifact's results are its graph's, as the gate judges: each output for itself."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from pt2e_quant.backends.judge_results import CEILING_DB, DRAW_MARGIN_DB, DRAWS
from pt2e_quant.backends.rounding_noise import run_with_rounding_noise
from pt2e_quant.backends.sample_run import run_on_sample
from pt2e_quant.backends.trials import other_rank
from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.flow.calibrate.sample import Sample, sqnr_db

__all__ = ["Expected", "OtherRank", "complaint", "complaint_of_inputs", "expect"]

MARGIN_DB = 6.0
"""As `Backend.lower` has it by default."""


class OtherRank(Exception):
    """A result has another number of dimensions in this call than was captured: no trial."""


class Expected:
    """What one call should return: of the float model and of the q/dq graph.

    The noisy runs are made where a result is not near enough, with the buffers of that call.

    Args:
        floats: the float model's result.
        graph: the q/dq graph's result.
        inputs: the call's leaves behind it, which the graph may have written.
        draws: makes the flat results of the graph with rounding noise.
    """

    def __init__(
        self, floats: Any, graph: Any, inputs: list[Any], draws: Callable[[], list[list[Any]]]
    ) -> None:
        self.floats = floats
        self.graph = graph
        self.inputs = inputs
        self._draws = draws
        self._drawn: list[list[Any]] | None = None

    @property
    def draws(self) -> list[list[Any]]:
        """The flat results of the graph with rounding noise."""
        if self._drawn is None:
            self._drawn = self._draws()
        return self._drawn


def expect(gm: GraphModule, floats: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Expected:
    """Run the graph once, which may write its buffers, and remember how to run it with noise.

    Raises:
        OtherRank: a squeeze removed a dimension whose size is 1 in this call alone.
    """
    capture = capture_of(gm)
    before = {name: buffer.clone() for name, buffer in gm.named_buffers()}
    leaves = tuple(capture.bind(args, kwargs))
    sample = Sample(leaves=leaves, float_outputs=None)

    def draws() -> list[list[Any]]:
        after = {name: buffer.clone() for name, buffer in gm.named_buffers()}
        _write(gm, before)
        found = [
            run_on_sample(gm, sample, partial(run_with_rounding_noise, gm, draw=draw))
            for draw in range(DRAWS)
        ]
        _write(gm, after)
        return found

    with torch.no_grad():
        copies = [v.clone() if isinstance(v, Tensor) else v for v in leaves]
        found = pytree.tree_leaves(gm(*capture.positional(copies)))
    if other := other_rank(gm, {f"result {at}": value for at, value in enumerate(found)}):
        raise OtherRank(other)
    graph = capture.unflatten_output(found)
    return Expected(floats, graph, copies, draws)


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
    bound = min(sqnr_db(floats[index], left) + MARGIN_DB, CEILING_DB)
    if ratio >= bound:
        return None
    own = min(sqnr_db(left, draw[index]) for draw in expected.draws) - DRAW_MARGIN_DB
    if not math.isnan(ratio) and ratio >= own:
        return None
    return f"SQNR {ratio:.1f} dB, expected {min(bound, own):.1f} dB"


def _integer_complaint(expected: Expected, index: int, left: Tensor, right: Tensor) -> str | None:
    """Integers are exact, but those made of rounded floats move with them."""
    wrong = int((left != right).sum())
    if not wrong or any(not torch.equal(left, draw[index]) for draw in expected.draws):
        return None
    return f"{wrong} of {left.numel()} integers differ"
