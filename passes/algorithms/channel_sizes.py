"""The reach of each channel of a linear's input up and down, estimated from weights alone.

The range of a row is set by its greatest and least channel. By Jensen's inequality the greatest of
C values is on average at most (sum of E[max(x, 0) ** 8]) ** (1/8): so the reach of a channel is
taken as its 8-norm, of the positive and of the negative part apart. Tails count: the product of a
gated MLP reaches much further than its variance says, and mostly to one side where gate and value
have rows alike.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.ops import LINEAR, MUL, argument, is_call
from pt2e_quant.passes.algorithms.channel_moments import (
    ChannelMoments,
    Moments,
    activation_input,
    apply_activation,
    quadrature,
)

POWER = 8
_POINTS = 16
_ROWS = 4096
"""Channels of a product that are integrated over at a time."""


@dataclass(frozen=True, slots=True)
class ChannelSizes:
    """Expected sizes of each channel, float64[C] all.

    Args:
        mean_square: of the channel.
        above: the 8-norm of its positive part.
        below: the 8-norm of its negative part.
    """

    mean_square: Tensor
    above: Tensor
    below: Tensor


@dataclass(frozen=True, slots=True)
class _Branch:
    """One factor of a product: a linear, and the function applied to what it gives."""

    linear: Node
    activation: Node | None

    def apply(self, values: Tensor) -> Tensor:
        return values if self.activation is None else apply_activation(self.activation, values)


def channel_sizes(moments: ChannelMoments, node: Node) -> ChannelSizes | None:
    """The sizes of a node's channels, None if nothing is known of them."""
    found = _product_sizes(moments, node)
    if found is not None:
        return found
    own = moments.of(node)
    if own is None:
        return None
    points, weights = quadrature(_POINTS)
    return _integrate(own.mean[:, None] + own.variance.sqrt()[:, None] * points, weights)


def _integrate(values: Tensor, weights: Tensor) -> ChannelSizes:
    """Sizes of values float64[C, points] with a probability for each point."""
    above = values.clamp(min=0.0).pow(POWER) @ weights
    below = values.clamp(max=0.0).pow(POWER) @ weights
    return ChannelSizes(values.square() @ weights, above ** (1 / POWER), below ** (1 / POWER))


def _product_sizes(moments: ChannelMoments, node: Node) -> ChannelSizes | None:
    """The sizes of f(linear(x)) * g(linear(x)): the two are correlated through their rows."""
    if not is_call(node, MUL):
        return None
    branches = [_branch(argument(node, name)) for name in ("self", "other")]
    first, second = branches
    if first is None or second is None or first.linear is second.linear:
        return None
    source = argument(first.linear, "input")
    given = moments.of(source)
    if given is None or argument(second.linear, "input") is not source:
        return None
    a, b = moments.of(first.linear), moments.of(second.linear)
    shared = _covariance(moments.gm, first.linear, second.linear, given)
    if a is None or b is None or shared is None:
        return None
    return _integrate_product((first, a), (second, b), shared)


def _branch(operand: object) -> _Branch | None:
    if not isinstance(operand, Node):
        return None
    source = activation_input(operand)
    linear, activation = (operand, None) if source is None else (source, operand)
    return _Branch(linear, activation) if is_call(linear, LINEAR) else None


def _covariance(gm: GraphModule, a: Node, b: Node, given: Moments) -> Tensor | None:
    """The covariance of two linears' channels, pair by pair, float64[out]."""
    weights = [constant_of(gm, argument(linear, "weight")) for linear in (a, b)]
    first, second = weights
    if first is None or second is None or first.shape != second.shape:
        return None
    return ((first.float() * second.float()) @ given.variance.float()).double()


def _integrate_product(
    a: tuple[_Branch, Moments], b: tuple[_Branch, Moments], shared: Tensor
) -> ChannelSizes:
    points, weights = quadrature(_POINTS)
    x, y = (grid.flatten() for grid in torch.meshgrid(points, points, indexing="ij"))
    both = (weights[:, None] * weights).flatten()
    spreads = [moments.variance.sqrt().clamp(min=1e-30) for _, moments in (a, b)]
    # rows that are multiples of each other would leave rounding of a variance of 0
    along = (shared / (spreads[0] * spreads[1])).clamp(-0.999, 0.999)
    across = (1 - along.square()).sqrt()
    parts = []
    for start in range(0, len(shared), _ROWS):
        rows = slice(start, start + _ROWS)
        first = a[1].mean[rows, None] + spreads[0][rows, None] * x
        mixed = along[rows, None] * x + across[rows, None] * y
        second = b[1].mean[rows, None] + spreads[1][rows, None] * mixed
        parts.append(_integrate(a[0].apply(first) * b[0].apply(second), both))
    return ChannelSizes(
        torch.cat([p.mean_square for p in parts]),
        torch.cat([p.above for p in parts]),
        torch.cat([p.below for p in parts]),
    )
