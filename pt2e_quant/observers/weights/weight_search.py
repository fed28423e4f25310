"""Qparams of constant weights: the whole range, the least squared error, or HQQ.

All work on a matrix whose rows each get one scale: a channel, or a group of one.
"""

from collections.abc import Callable
from enum import StrEnum

import torch
from torch import Tensor

from pt2e_quant.core.errors import member_named
from pt2e_quant.core.one_thread import one_thread
from pt2e_quant.core.qparams import DEFAULT_EPS, choose_qparams

_BLOCK = 1 << 16
"""Elements searched at a time: several passes over them stay in the cache."""

_PARTS = torch.linspace(0.5, 1.1, 13).tolist()
"""Parts of the whole range that are tried; more than 1 as the top integer may be out of reach."""

_BESIDE = (-0.025, 0.025)
"""Parts beside the best of those that are tried then: the middles to its neighbours."""

_COARSE = 64
"""Ranges of fewer integers have errors so far above float32's rounding that they may be found as a
difference of sums, in half the passes over the weight."""

Qparams = tuple[Tensor, Tensor]


class WeightSearch(StrEnum):
    """Method that chooses the scale of a weight.

    MSE tries parts of the range and refines each by least squares. HQQ minimises the p-norm of
    the error by half-quadratic splitting (Badri & Shaji, 2023, "Half-Quadratic Quantization").
    """

    MIN_MAX = "min_max"
    MSE = "mse"
    HQQ = "hqq"

    @staticmethod
    def named(name: str) -> "WeightSearch":
        """The search of a name.

        Raises:
            ConfigError: there is none; near names are offered.
        """
        return member_named(WeightSearch, name, "search")


def search_qparams(
    rows: Tensor, search: WeightSearch, *, quant_min: int, quant_max: int, symmetric: bool
) -> Qparams:
    """Scale float32[R] and zero_point int32[R] for each row of float[R, N].

    Args:
        rows: finite values.
        search: how.
        quant_min: least integer used.
        quant_max: greatest integer used.
        symmetric: zero_point is 0 (the middle, rounded up, where quant_min is 0).
    """
    find = _SEARCHES[search]
    step = max(1, _BLOCK // max(1, rows.shape[1]))
    limits = (float(quant_min), float(quant_max))
    with one_thread():
        found = [
            find(rows[i : i + step].to(torch.float32), limits, symmetric)
            for i in range(0, rows.shape[0], step)
        ]
    scale, zero_point = (torch.cat(parts) for parts in zip(*found, strict=True))
    return scale, zero_point.to(torch.int32)


def _integers(
    rows: Tensor, scale: Tensor, zero_point: Tensor, limits: tuple[float, float]
) -> Tensor:
    # The arithmetic of the quantize op: a product with 1 / scale.
    scaled = rows * (1.0 / scale).unsqueeze(1)
    return scaled.round_().add_(zero_point.unsqueeze(1)).clamp_(*limits)


def qparams_of_range(
    least: Tensor, greatest: Tensor, *, quant_min: int, quant_max: int, symmetric: bool
) -> Qparams:
    """Return the result of `search_qparams` by MIN_MAX for rows of these ranges.

    The scale of symmetric weights in all of int8 is max(-least / 128, greatest / 127), as that of
    torch's `ChooseQuantizationParams`: nothing is clipped, and codes of dequantized weights are the
    same again. With other widths of two's complement the scale is the least at which no value is
    off by more than half a step, max(-least / 8.5, greatest / 7.5) for 4 bits: the range over the
    number of steps, as observers of torch.ao have it, or finer. docs/decisions/035 has the figures.

    Args:
        least: of each row, float32[R].
        greatest: likewise.
        quant_min: least integer used.
        quant_max: greatest integer used.
        symmetric: see `search_qparams`.
    """
    if symmetric and (quant_min, quant_max) == (-128, 127):
        scale = torch.maximum(least / -128.0, greatest / 127.0).clamp(min=DEFAULT_EPS)
        return scale, torch.zeros_like(scale, dtype=torch.int32)
    if symmetric and quant_min == -quant_max - 1:
        ends = least / (quant_min - 0.5), greatest / (quant_max + 0.5)
        scale = torch.maximum(*ends).clamp(min=DEFAULT_EPS)
        return scale, torch.zeros_like(scale, dtype=torch.int32)
    return _over_steps(least, greatest, (quant_min, quant_max), symmetric)


def _over_steps(
    least: Tensor, greatest: Tensor, limits: tuple[int, int], symmetric: bool
) -> Qparams:
    """The range over the number of steps."""
    return choose_qparams(
        least,
        greatest,
        quant_min=limits[0],
        quant_max=limits[1],
        symmetric=symmetric,
        zero_point_if_symmetric=_middle(limits),
    )


def _min_max(rows: Tensor, limits: tuple[float, float], symmetric: bool) -> Qparams:
    low, high = (int(limit) for limit in limits)
    ends = (rows.amin(1), rows.amax(1))
    scale, zero_point = qparams_of_range(*ends, quant_min=low, quant_max=high, symmetric=symmetric)
    return scale, zero_point.to(torch.float32)


def _start(rows: Tensor, limits: tuple[float, float], symmetric: bool) -> Qparams:
    """The range that MSE tries parts of: over the number of steps, which is never the narrower."""
    low, high = (int(limit) for limit in limits)
    if symmetric and (low, high) == (-128, 127):
        return _min_max(rows, limits, symmetric)
    scale, zero_point = _over_steps(rows.amin(1), rows.amax(1), (low, high), symmetric)
    return scale, zero_point.to(torch.float32)


def _middle(limits: tuple[float, float]) -> int:
    return 0 if limits[0] < 0 else int((limits[0] + limits[1] + 1) // 2)


def _mse(rows: Tensor, limits: tuple[float, float], symmetric: bool) -> Qparams:
    """Try parts of the range, each with the scale of least squares for its integers."""
    whole, zero_of_whole = _start(rows, limits, symmetric)
    best_scale, best_zero = _min_max(rows, limits, symmetric)
    best_part = torch.ones_like(whole)
    best_error = _squared_error(rows, best_scale, best_zero, limits)
    fit = _Fit(rows, limits, is_centred=symmetric and limits[0] < 0)
    floor = rows.amin(1).clamp(max=0.0)

    def take(part: Tensor) -> None:
        nonlocal best_scale, best_zero, best_part, best_error
        zero = zero_of_whole
        if not symmetric:
            # A shrunk range keeps its end that lies nearer to 0.
            zero = (limits[0] - torch.round(floor / whole)).clamp(*limits)
        scale, error = fit(whole * part, zero)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale, best_scale)
        best_zero = torch.where(better, zero, best_zero)
        best_part = torch.where(better, part, best_part)

    for part in _PARTS:
        take(torch.full_like(whole, part))
    nearest = best_part
    for offset in _BESIDE:
        take(nearest + offset)
    return _refitted(rows, best_scale, best_zero, limits)


class _Fit:
    """The scale of least squares for the integers that a scale gives, and its squared error.

    Args:
        rows: the weight.
        limits: least and greatest integer.
        is_centred: zero_point is 0.
    """

    def __init__(self, rows: Tensor, limits: tuple[float, float], *, is_centred: bool) -> None:
        self.rows = rows
        self.limits = limits
        self.is_centred = is_centred
        self.energy = torch.linalg.vecdot(rows, rows)
        self.steps, self.product = torch.empty_like(rows), torch.empty_like(rows)

    def __call__(self, scale: Tensor, zero: Tensor) -> Qparams:
        rows, steps = self.rows, self.steps
        torch.mul(rows, (1.0 / scale).unsqueeze(1), out=steps)
        if self.is_centred:
            steps.round_().clamp_(*self.limits)
        else:
            column = zero.unsqueeze(1)
            steps.round_().add_(column).clamp_(*self.limits).sub_(column)
        norm, along = torch.linalg.vecdot(steps, steps), torch.linalg.vecdot(rows, steps)
        fitted = along / norm.clamp(min=1.0)
        fitted = torch.where(fitted > DEFAULT_EPS, fitted, scale)
        if self.limits[1] - self.limits[0] < _COARSE:
            return fitted, self.energy - fitted * (2 * along - fitted * norm)
        torch.mul(steps, fitted.unsqueeze(1), out=self.product)
        self.product.sub_(rows)
        return fitted, torch.linalg.vecdot(self.product, self.product)


def _refitted(rows: Tensor, scale: Tensor, zero: Tensor, limits: tuple[float, float]) -> Qparams:
    """A scale and the integers it gives, fitted to each other while the error falls."""
    error = _squared_error(rows, scale, zero, limits)
    for _ in range(2):
        steps = _integers(rows, scale, zero, limits).sub_(zero.unsqueeze(1))
        norm = torch.linalg.vecdot(steps, steps).clamp(min=1.0)
        fitted = torch.linalg.vecdot(rows, steps) / norm
        fitted = torch.where(fitted > DEFAULT_EPS, fitted, scale)
        found = _squared_error(rows, fitted, zero, limits)
        scale = torch.where(found < error, fitted, scale)
        error = torch.minimum(error, found)
    return scale, zero


def _squared_error(
    rows: Tensor, scale: Tensor, zero_point: Tensor, limits: tuple[float, float]
) -> Tensor:
    steps = _integers(rows, scale, zero_point, limits).sub_(zero_point.unsqueeze(1))
    return steps.mul_(scale.unsqueeze(1)).sub_(rows).square_().sum(1)


def _hqq(rows: Tensor, limits: tuple[float, float], symmetric: bool) -> Qparams:
    """HQQ with its published settings: p 0.7, beta 10, growing by 1.01, 20 rounds.

    As published it moves a real zero_point at a fixed scale. Integer kernels take integer
    zero_points, so here the zero_point is rounded in each round and the scale fitted behind it.
    """
    norm, beta, growth, rounds = 0.7, 10.0, 1.01, 20
    scale, zero = _min_max(rows, limits, symmetric)
    best_scale, best_zero = scale, zero
    best = torch.full_like(scale, torch.inf)
    for _ in range(rounds):
        steps = _integers(rows, scale, zero, limits)
        error = rows - (steps - zero.unsqueeze(1)) * scale.unsqueeze(1)
        size = error.abs()
        cost = size.pow(norm).sum(1)
        better = cost < best
        best = torch.where(better, cost, best)
        best_scale = torch.where(better, scale, best_scale)
        best_zero = torch.where(better, zero, best_zero)
        # The proximal step of the p-norm: large errors are outliers and left out of the fit.
        shrunk = torch.relu(size - size.clamp(min=1e-8).pow(norm - 1) / beta)
        target = rows - torch.sign(error) * shrunk
        if not symmetric:
            zero = (steps - target / scale.unsqueeze(1)).mean(1).round().clamp(*limits)
        offsets = steps - zero.unsqueeze(1)
        fitted = (target * offsets).sum(1) / offsets.square().sum(1).clamp(min=1.0)
        scale = torch.where(fitted > DEFAULT_EPS, fitted, scale)
        beta *= growth
    return best_scale, best_zero


_SEARCHES: dict[WeightSearch, Callable[[Tensor, tuple[float, float], bool], Qparams]] = {
    WeightSearch.MIN_MAX: _min_max,
    WeightSearch.MSE: _mse,
    WeightSearch.HQQ: _hqq,
}


_LIBRARY = torch.library.Library("pt2e_quant", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's own
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "search_scales(Tensor rows, str search, int quant_min, int quant_max, bool symmetric) "
    "-> (Tensor, Tensor)"
)


def _run_search(
    rows: Tensor, search: str, quant_min: int, quant_max: int, symmetric: bool
) -> Qparams:
    limits = {"quant_min": quant_min, "quant_max": quant_max}
    return search_qparams(rows, WeightSearch(search), symmetric=symmetric, **limits)


def _fake_search(
    rows: Tensor, search: str, quant_min: int, quant_max: int, symmetric: bool
) -> Qparams:
    scale = rows.new_empty(rows.shape[0], dtype=torch.float32)
    return scale, torch.empty_like(scale, dtype=torch.int32)


torch.library.impl(_LIBRARY, "search_scales", "CompositeExplicitAutograd")(_run_search)
torch.library.register_fake("pt2e_quant::search_scales", lib=_LIBRARY)(_fake_search)

SearchScales = torch.ops.pt2e_quant.search_scales.default
"""`search_qparams` as an operator: compiled training calls it whole, where a compiler that follows
the search would write each trial of each block of rows out."""
