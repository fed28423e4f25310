"""Judge, result by result, whether an artifact equals its graph up to rounding."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from pt2e_quant.backends.compare_results import Results, compare
from pt2e_quant.backends.first_apart import FirstApart, LowerPart, find_first_apart
from pt2e_quant.backends.rounding_noise import DRAWS, bound_with_flips, flip_draws
from pt2e_quant.backends.run_calls import BUFFER
from pt2e_quant.backends.trials import Trials
from pt2e_quant.core.errors import ArtifactError
from pt2e_quant.core.qdq import is_dequantize
from pt2e_quant.core.qparams import DEFAULT_EPS
from pt2e_quant.flow.calibrate.sample import Sample
from pt2e_quant.graph.ops import (
    CLAMP,
    HARDTANH,
    LEAKY_RELU,
    RELU,
    RELU6,
    SIGMOID,
    TANH,
    VIEWS,
    Overloads,
    is_call,
)
from pt2e_quant.kernels.quantized_values import affine_of

FLOOR_DB = 20.0
"""The bound where the float result on the sample is not known."""

CEILING_DB = 35.0
"""No more is asked: 8-bit outputs that are all off by one step are 36 dB apart, and runtimes may
round ties their own way."""

FLOAT_CEILING_DB = 60.0
"""No more is asked of results that quantization does not reach. Runtimes' float operators are some
120 dB apart, their approximations of functions 74 (gelu)."""

DRAW_MARGIN_DB = 1.0
"""The accepted margin over the furthest draw: a quarter more noise energy. Where rounding
is amplified to the full, draws lie within fractions of a dB, and so does an artifact."""

ROUNDED_SHARE = 1 / 3
"""The share of a quantized result's values that may be one step off, whatever its size.

A value d steps off before it is rounded is rounded to a neighbour with probability d. Where d is
no larger than what rounding itself is off by (at most half a step, a quarter in the mean), a
quarter of the values differ. CEILING_DB alone is less than that for outputs of 32 steps, in root
mean square. A shift by a step, or rounding down in place of to the nearest, is above it."""

FRESH_MARGIN_DB = 3.0
"""The margin for the calls after the sample's: they are many, and each may be the one in 17."""

_ELEMENTWISE: Overloads = (
    *(*VIEWS, *RELU, *RELU6, *HARDTANH, *CLAMP, *LEAKY_RELU, *SIGMOID, *TANH),
)
"""Operators between the last quantize and a result that keep a difference of one step."""


@dataclass(slots=True, kw_only=True)
class Judge:
    """Compares results with the canonical graph's.

    Args:
        trials: the calls, and what the graph gives.
        bounds: the least SQNR of each float result; FLOOR_DB for the others.
        drawn: the results that depend on random numbers: no two runs agree in them.
        notes: what the report is to say.
        lower_part: see `check_artifact`; None where a search could not see the fault.
    """

    trials: Trials
    bounds: Mapping[str, float]
    drawn: Collection[str] = ()
    notes: list[str] = field(default_factory=list)
    lower_part: LowerPart | None = None

    def judge(self, at: int, found: Results, where: str) -> None:
        """Compare all results of one call.

        Args:
            at: the number of the call.
            found: what the artifact gave; its buffers may be fewer than the graph's.
            where: of the call, for the error.

        Raises:
            ArtifactError: naming the first result that is apart.
        """
        expected = self.trials.trials[at].results
        results = [name for name in expected if not _is_buffer(name)]
        for name in results:
            if name not in found:
                count = sum(not _is_buffer(n) for n in found)
                raise _apart(where, f"{count} results, and no {name}")
        for name in expected:
            if name in self.drawn:
                self._judge_drawn(name, expected[name], found.get(name), where)
            elif name in found:
                shown = f"{name} " if len(results) > 1 or _is_buffer(name) else ""
                self._judge_one(at, name, found[name], where, shown)

    def _judge_drawn(self, name: str, expected: Any, value: Any, where: str) -> None:
        """Compare what two runs have in common where random numbers, and sizes by them, differ."""
        kinds = [
            f"{v.dtype} of {v.dim()} dimensions" if isinstance(v, Tensor) else type(v).__name__
            for v in (expected, value)
        ]
        if value is not None and kinds[0] != kinds[1]:
            raise _apart(where, f"{name} is {kinds[1]}, expected {kinds[0]}")
        self._note(
            f"{name} depends on random numbers, which each run draws anew: its values are compared "
            "neither with the graph's nor with the float model's"
        )

    def _judge_one(self, at: int, name: str, value: Any, where: str, shown: str) -> None:
        expected = self.trials.trials[at].results[name]
        difference = compare(expected, value)
        if difference.wrong:
            self._judge_integers(at, name, difference.wrong, where, shown, difference.total)
        ratio = difference.ratio_db
        bound, reason = self.bounds.get(name, FLOOR_DB), ""
        if ratio < bound and self._is_one_rounding(at, name, expected, value):
            return
        if ratio < bound and not difference.problem and self._is_faint(name, expected, value):
            return
        margin = FRESH_MARGIN_DB if at else DRAW_MARGIN_DB
        if ratio < bound:
            own = self._own_noise_db(at, name, ratio + margin)
            if own - margin < bound:
                bound = own - margin
                reason = ", as far as float rounding alone moves this graph"
                self._note(
                    "this graph amplifies float rounding: computed with noise of the size of "
                    f"rounding it differs from itself by {own:.1f} dB"
                )
        least = self._bound_with_flips(at, name, ratio, bound) if ratio < bound else bound
        if difference.problem or ratio < least:
            apart = self._first_apart(at, name, value, bound)
            if apart and not difference.problem and self._adds_up(at, name, apart, ratio + margin):
                return
            text = f"{shown}SQNR {ratio:.1f} dB, expected at least {least:.1f} dB{reason}"
            if difference.problem:
                text += f"; {difference.problem}"
            raise _apart(where, text, apart, fix="lower(..., margin_db=…) to accept it, ")

    def _judge_integers(
        self, at: int, name: str, wrong: int, where: str, shown: str, total: int
    ) -> None:
        """Judge integers, bools and numbers: equal, except where rounding flips a step."""
        expected = self.trials.trials[at].results[name]
        more = 10 ** ((FRESH_MARGIN_DB if at else DRAW_MARGIN_DB) / 10)
        most = 0
        for draw in flip_draws(self.trials.gm):
            flipped = self.trials.flipped(at, draw)[name]
            most = max(most, int(compare(expected, flipped).wrong * more))
            if most >= wrong:
                self._note(
                    f"{name}: {wrong} of {total} values differ from the graph's, no more than "
                    "where its sums and steps are rounded another way"
                )
                return
        allowed = f"at most {most}, as many as flip where sums are rounded another way"
        text = f"{shown}{wrong} of {total} values differ, expected {allowed if most else 'none'}"
        raise _apart(where, text, self._last_node(name))

    def _is_one_rounding(self, at: int, name: str, expected: Any, value: Any) -> bool:
        """True if few enough of a result's values are off by one step of the quantize behind it."""
        node = self._leaf(name)
        while isinstance(node, Node) and is_call(node, _ELEMENTWISE):
            node = node.args[0]
        affine = affine_of(node) if isinstance(node, Node) and is_dequantize(node) else None
        if affine is None or compare(expected, value).problem:
            return False
        wanted = expected.double()
        moved = [self.trials.shifted(at, node, by)[name] for by in (affine.scale, -affine.scale)]
        step = torch.stack([(result.double() - wanted).abs() for result in moved]).amax(0)
        rounding = wanted.abs().max() * 2.0**-20
        off = (value.double() - wanted).abs()
        share = float((off > step / 2 + rounding).double().mean())
        if bool((off > step * 1.01 + rounding).any()) or share > ROUNDED_SHARE:
            return False
        self._note(f"{name}: {share:.0%} of its values are a step from the graph's, none further")
        return True

    def _is_faint(self, name: str, expected: Any, value: Any) -> bool:
        """True if the graph rounds a result to zeros and a runtime does not: it has no least scale.

        A network that was never trained may give such results: each of its blocks starts at zero.
        """
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        if not is_float or bool(expected.any()) or not bool((value.abs() < DEFAULT_EPS).all()):
            return False
        self._note(
            f"{name}: the graph gives zeros, as its scales are {DEFAULT_EPS:.2g} or more; this "
            "runtime keeps what is below"
        )
        return True

    def _adds_up(self, at: int, name: str, apart: FirstApart, enough_db: float) -> bool:
        """True if each operator agrees, and their roundings together are what moves this graph."""
        if not apart.adds_up or self._least_db(at, name, enough_db, self.trials.moved) > enough_db:
            return False
        self._note(
            f"{name}: each operator agrees with the graph's; together they differ by no more than "
            "where one in eight quantized values is rounded to its other neighbour"
        )
        return True

    def _own_noise_db(self, at: int, name: str, enough_db: float) -> float:
        """The least SQNR of the graph with rounding noise; no more draws once it is `enough_db`."""
        return self._least_db(at, name, enough_db, self.trials.noisy)

    def _least_db(
        self, at: int, name: str, enough_db: float, run: Callable[[int, int], Results]
    ) -> float:
        expected, least = self.trials.trials[at].results[name], math.inf
        for draw in range(DRAWS):
            ratio = compare(expected, run(at, draw)[name]).ratio_db
            least = min(least, -math.inf if math.isnan(ratio) else ratio)
            if least <= enough_db:
                break
        return least

    def _bound_with_flips(self, at: int, name: str, found_db: float, bound_db: float) -> float:
        """The bound of a result, where the graph's steps may flip as on another runtime."""
        expected = self.trials.trials[at].results[name]
        draws = (self.trials.flipped(at, draw)[name] for draw in flip_draws(self.trials.gm))
        flips = (compare(expected, value).ratio_db for value in draws)
        bound = bound_with_flips(bound_db, found_db, flips)
        if found_db >= bound:
            self._note(
                f"{name}: {found_db:.1f} dB from the graph's, no more than where its steps "
                "(comparisons, floors, indices) flip as its sums are rounded another way"
            )
        return bound

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _last_node(self, name: str) -> FirstApart | None:
        """The node that gives a result, for what no search is made."""
        node = self._leaf(name)
        return FirstApart(text=f"it is {node.name}", node=node) if isinstance(node, Node) else None

    def _leaf(self, name: str) -> Any:
        """The entry of the graph's output that gives a result; None for a buffer."""
        names = [n for n in self.trials.trials[0].results if not _is_buffer(n)]
        leaves = pytree.tree_leaves(self.trials.gm.graph.output_node().args[0])
        return leaves[names.index(name)] if name in names and len(leaves) == len(names) else None

    def _first_apart(self, at: int, name: str, value: Any, bound_db: float) -> FirstApart | None:
        leaf = self._leaf(name)
        if self.lower_part is None or not isinstance(leaf, Node):
            return None
        trial = self.trials.trials[at]
        sample = Sample(leaves=trial.leaves, float_outputs=None)
        pair = (trial.results[name], value)
        try:
            return find_first_apart(self.trials.gm, sample, leaf, pair, self.lower_part, bound_db)
        except Exception:  # Whatever stops the search: the check failed, and that is the error.
            return None


def _is_buffer(name: str) -> bool:
    return name.startswith(BUFFER)


def _apart(where: str, text: str, apart: FirstApart | None = None, fix: str = "") -> ArtifactError:
    return ArtifactError(
        f"the artifact differs from the canonical graph{where}: {text}"
        f"{f'; {apart.text}' if apart else ''}",
        node=apart.node if apart else None,
        fix=f"{fix}verify=False to look at it",
    )
