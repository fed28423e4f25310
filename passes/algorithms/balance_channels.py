"""Even out the channels of linears' inputs for qparams found at run time, from weights alone."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import log10
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn import functional as F

from pt2e_quant.core.dtypes import limits_of
from pt2e_quant.core.specs import Q_ANNOTATION_KEY
from pt2e_quant.graph.ops import LINEAR, argument
from pt2e_quant.observers.partial_wrapper import given_argument
from pt2e_quant.observers.qschemes import PER_CHANNEL, SYMMETRIC
from pt2e_quant.observers.statistics.base import Statistics
from pt2e_quant.passes.algorithms.algorithm import Algorithm, Site
from pt2e_quant.passes.algorithms.algorithm_graph import AlgorithmGraph, is_quantized_output
from pt2e_quant.passes.algorithms.channel_moments import ChannelMoments
from pt2e_quant.passes.algorithms.channel_sizes import POWER, ChannelSizes, channel_sizes
from pt2e_quant.passes.algorithms.grid import Declined
from pt2e_quant.passes.algorithms.scale_targets import Factors, Rows, divide_inputs, fold_target

EXPONENTS = ((0.0, 0.0), *product((0.3, 0.5, 0.7, 1.0), (0.0, 0.15, 0.3)))
"""(a, b) of the family; the first changes nothing but signs."""
WIDEST = 1000.0
"""The greatest ratio of two channels' sizes that is believed."""
STEPS = 255.0


@dataclass(frozen=True, slots=True)
class _Plan:
    source: Node
    linears: tuple[Node, ...]
    target: Factors | Rows | str
    balance: "Balance"


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceChannels(Algorithm):
    """Divide linears' inputs by a factor per channel, and multiply their weights by it.

    It needs no data and runs nothing. How large channels are is estimated from the weights before
    them (`channel_sizes`), and the factors are those with the least expected rounding error. They
    go into the norm that makes the input, into the rows of a linear (also one factor of a gated
    product, or before a relu), or, where a residual reads the norm too, into a multiplication.
    Linears with integer weights take part whose inputs are float or rounded at run time.

    Before:  y = layer_norm(x, g, b);          linear(y, w)
    After:   y = layer_norm(x, g / f, b / f);  linear(y, w * f)

    The family is SmoothQuant's (equation 4, there with a + b = 1 and calibrated sizes),

        |f_j| = size_j ** a / max|W_j| ** b,

    and of it the factor with the least expected error is taken, as rounding predicts it: the step
    of the input from the range of a row, the steps of the weight from its rows or groups. Where the
    qparams of the input are affine, a channel that reaches further down than up gets a negative
    factor: with all long tails on one side the range is little more than half as wide.

    Args:
        least_gain: by what factor the expected error must fall.
    """

    name: ClassVar[str] = "balance_channels"
    paper: ClassVar[str] = "after Xiao et al. 2023, SmoothQuant, arXiv 2211.10438, without data"
    fits: ClassVar[str] = (
        "linears with integer weights per channel or group, whose inputs are float or quantized at "
        "run time"
    )

    least_gain: float = 1.1

    def sites(self, graph: AlgorithmGraph) -> Iterable[Site]:
        """The first linear of each input, with the factors that the weights call for."""
        readers: dict[Node, list[Node]] = {}
        for linear in graph.calls(LINEAR):
            if _rounding_of(linear) is not None:
                readers.setdefault(argument(linear, "input"), []).append(linear)
        moments = ChannelMoments(graph.gm)
        for source, linears in readers.items():
            plan: _Plan | Declined
            try:
                plan = self._plan(graph, moments, source, linears)
            except Declined as reason:
                plan = reason
            yield Site(graph, linears[0], "input", plan)

    def _plan(
        self, graph: AlgorithmGraph, moments: ChannelMoments, source: Node, linears: Sequence[Node]
    ) -> _Plan:
        kinds = {_rounding_of(linear) for linear in linears}
        rounding = next(iter(kinds))
        if len(kinds) > 1 or rounding is None:
            raise Declined("its readers have different schemes")
        weights = [graph.constant(linear, "weight").value for linear in linears]
        target = fold_target(graph, source, linears)
        if isinstance(target, str) and not moments.is_norm(source):
            raise Declined(target)
        sizes = channel_sizes(moments, source)
        if sizes is None or not _is_usable(sizes, weights[0].shape[-1]):
            raise Declined("the weights before it do not tell its channels' sizes")
        keeps_sign = isinstance(target, Rows) and target.keeps_sign
        balance = choose_balance(torch.cat(weights), sizes, rounding, keeps_sign=keeps_sign)
        if not balance.error_before > balance.error * self.least_gain:
            raise Declined("no factor per channel lowers the expected error enough")
        return _Plan(source, tuple(linears), target, balance.exact_in(weights[0].dtype))

    def apply(self, site: Site, statistics: Statistics | None) -> str:
        """Divide one input."""
        plan: _Plan = site.plan
        divide_inputs(
            site.graph,
            plan.target,
            plan.balance.factors,
            source=plan.source,
            linears=plan.linears,
            by=self.name,
        )
        return plan.balance.step


def _rounding_of(linear: Node) -> "Rounding | None":
    """Return the operands that a linear's annotation rounds; None where balancing does not apply.

    Static inputs have calibrated statistics, which tell more (`smooth_quant`); weights in
    floats, codebooks or blocks round by other rules.
    """
    annotation = linear.meta.get(Q_ANNOTATION_KEY)
    source = argument(linear, "input")
    specs = getattr(annotation, "input_qspec_map", {})
    weight: Any = specs.get(argument(linear, "weight"))
    given: Any = specs.get(source)
    if not _is_plain(weight) or weight.qscheme not in PER_CHANNEL or is_quantized_output(source):
        return None
    if given is not None and not (_is_plain(given) and given.is_dynamic):
        return None
    limits = limits_of(weight.dtype)
    low = limits.quant_min if weight.quant_min is None else weight.quant_min
    high = limits.quant_max if weight.quant_max is None else weight.quant_max
    return Rounding(
        weight_steps=(high - low) / 2,
        group_size=_group_size(weight.observer_or_fake_quant_ctr),
        rounds_input=given is not None,
        is_affine=given is not None and given.qscheme not in SYMMETRIC,
    )


def _is_plain(spec: Any) -> bool:
    """True if a spec asks for integers that torch's qschemes say all of."""
    has_observer = getattr(spec, "observer_or_fake_quant_ctr", None) is not None
    return has_observer and hasattr(spec, "qscheme") and not spec.dtype.is_floating_point


def _group_size(constructor: Any) -> int | None:
    inner = given_argument(constructor, "observer")
    found: int | None = given_argument(inner or constructor, "group_size")
    return found


def _is_usable(sizes: ChannelSizes, channels: int) -> bool:
    reach = sizes.above + sizes.below
    return len(reach) == channels and bool(reach.isfinite().all()) and float(reach.max()) > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """The rounded operands of a linear, and their rounding.

    Args:
        weight_steps: integers of the weight on either side of zero.
        group_size: weights of a row that share a scale; None for the whole row.
        rounds_input: the input is rounded to 8 bits at run time.
        is_affine: its zero_point is free.
    """

    weight_steps: float
    group_size: int | None
    rounds_input: bool
    is_affine: bool


@dataclass(frozen=True, slots=True)
class Balance:
    """A chosen factor: divide the input's channels by it.

    Args:
        factors: float64[C], never 0.
        exponents: (a, b) of the family.
        error: expected squared error per row of the output.
        error_before: the same without.
    """

    factors: Tensor
    exponents: tuple[float, float]
    error: float
    error_before: float

    def exact_in(self, dtype: torch.dtype) -> "Balance":
        """In half precision, the nearest powers of two: they multiply without rounding."""
        if dtype.itemsize >= 4:
            return self
        magnitude = torch.exp2(self.factors.abs().log2().round())
        return replace(self, factors=magnitude * self.factors.sign())

    @property
    def step(self) -> str:
        """One line for notes and reports."""
        gain = 10 * log10(self.error_before / max(self.error, 1e-300))
        flipped = int((self.factors < 0).sum())
        signs = f", {flipped} negative" if flipped else ""
        size, column = self.exponents
        return (
            f"/ size ** {size:g} * weight ** {column:g} per channel{signs}: "
            f"{gain:.1f} dB less error expected"
        )


def choose_balance(
    weight: Tensor, sizes: ChannelSizes, rounding: Rounding, *, keeps_sign: bool = False
) -> Balance:
    """The factor with the least expected error.

    Args:
        weight: [out, C], all that multiplies the input.
        sizes: of the input's channels.
        rounding: what is rounded.
        keeps_sign: no factor may be negative.
    """
    weight = weight.float()
    signs = torch.ones_like(sizes.above)
    if rounding.rounds_input and rounding.is_affine and not keeps_sign:
        # a tie is broken by rounding: a channel as long on both sides keeps its sign
        signs[sizes.below > 1.001 * sizes.above] = -1.0
    factors = _family(weight, sizes)
    errors = _weight_errors(weight, sizes, rounding, factors)
    before = errors[0]
    if rounding.rounds_input:
        before = before + _input_errors(weight, sizes, factors[:1])[0]
        errors = errors + _input_errors(weight, sizes, factors * signs)
    best = int(errors.argmin())
    return Balance(factors[best] * signs, EXPONENTS[best], float(errors[best]), float(before))


def _family(weight: Tensor, sizes: ChannelSizes) -> Tensor:
    """Magnitudes of all candidates, float64[candidates, C], around 1."""
    reach = (sizes.above**POWER + sizes.below**POWER) ** (1 / POWER)
    columns = weight.abs().amax(0).double()
    logs = []
    for values in (reach, columns):
        greatest = values.max().clamp(min=torch.finfo(torch.float32).tiny)
        logs.append((values / greatest).clamp(min=1 / WIDEST).log())
    exponents = torch.tensor(EXPONENTS, dtype=torch.float64)
    raised = exponents[:, :1] * logs[0] - exponents[:, 1:] * logs[1]
    return (raised - raised.median(dim=1, keepdim=True).values).exp()


def _input_errors(weight: Tensor, sizes: ChannelSizes, factors: Tensor) -> Tensor:
    """Expected squared error per row of the output from rounding the input, of each candidate."""
    positive = factors > 0
    ups = torch.where(positive, sizes.above, sizes.below) / factors.abs()
    downs = torch.where(positive, sizes.below, sizes.above) / factors.abs()
    up, down = (side.pow(POWER).sum(1) ** (1 / POWER) for side in (ups, downs))
    columns = weight.square().sum(0).double()
    return ((up + down) / STEPS).square() / 12 * (factors.square() @ columns)


def _weight_errors(
    weight: Tensor, sizes: ChannelSizes, rounding: Rounding, factors: Tensor
) -> Tensor:
    """Expected squared error per row of the output from rounding the weight, of each candidate.

    The greatest |weight * factor| of a row or group is its 8-norm, so that one product with a
    matrix does for all candidates.
    """
    rows, channels = weight.shape
    group = rounding.group_size or channels
    missing = -channels % group
    blocks = F.pad(weight, (0, missing)).reshape(rows, -1, group)
    peaks = blocks.abs().amax(2, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny)
    shares = (blocks / peaks).square_().square_().square_()
    raised = F.pad(factors.abs().pow(POWER), (0, missing)).reshape(len(factors), -1, group)
    # [groups, out, group] @ [groups, group, candidates]
    sums = shares.transpose(0, 1) @ raised.permute(1, 2, 0).float()
    greatest = peaks.transpose(0, 1).square() * sums ** (2 / POWER)
    squares = F.pad(sizes.mean_square / factors.square(), (0, missing))
    per_group = squares.reshape(len(factors), -1, group).sum(2)
    steps = greatest.sum(1).double().T / rounding.weight_steps**2
    return (steps * per_group).sum(1) / 12
