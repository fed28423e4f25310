"""Choose a factor per channel that lowers the expected error of a linear in integers.

A linear's input is divided by f_j in channel j and its weight multiplied by it: in float nothing
changes. In integers a large channel no longer sets the step of all others, while a weight that is
multiplied up sets that of its row or group. The family is SmoothQuant's (Xiao et al. 2023, equation
4, there with a + b = 1 and calibrated sizes),

    |f_j| = size_j ** a / max|W_j| ** b,

and of it the factor with the least expected error is taken, as rounding predicts it: the step of
the input from the range of a row, the steps of the weight from its rows or groups. Where the
qparams of the input are affine, a channel that reaches further down than up gets a negative factor:
with all long tails on one side the range is little more than half as wide.
"""

from dataclasses import dataclass, replace
from itertools import product
from math import log10

import torch
from torch import Tensor
from torch.nn import functional as F

from pt2e_quant.passes.algorithms.channel_sizes import POWER, ChannelSizes

__all__ = ["Balance", "Rounding", "choose_balance"]

EXPONENTS = ((0.0, 0.0), *product((0.3, 0.5, 0.7, 1.0), (0.0, 0.15, 0.3)))
"""(a, b) of the family; the first changes nothing but signs."""
WIDEST = 1000.0
"""The greatest ratio of two channels' sizes that is believed."""
STEPS = 255.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """What is rounded in a linear.

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
    """The same from rounding the weight.

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
