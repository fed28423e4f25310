"""Mean and variance of each channel of a tensor, estimated from the weights before it.

No data and no run: a rule for each operator says what it makes of them, starting at norms. That is
rough, and good enough to tell which channels are large: an estimate may only steer a choice that
is exact in float whatever it is.

Channels are taken as independent and normally distributed. A norm's output is known whatever it
normalises: its channels have mean beta and variance gamma squared.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.graph.idioms.rms_norm import FEATURE_NORMS, find_roots, is_normalized
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.ops import (
    ADD,
    CASTS,
    DROPOUT,
    ELU,
    GELU,
    HARDSWISH,
    IDENTITIES,
    LAYER_NORM,
    LEAKY_RELU,
    LINEAR,
    MATMUL,
    MUL,
    PERMUTE,
    RELU,
    RELU6,
    RESHAPE,
    SDPA,
    SIGMOID,
    SILU,
    TANH,
    Overloads,
    argument,
    aten,
    is_call,
)

ACTIVATIONS: Overloads = (
    *(*RELU, *RELU6, *GELU, *SILU, *SIGMOID, *TANH, *HARDSWISH, *ELU, *LEAKY_RELU),
)
"""Functions of one element."""

_PASSED_ON: Overloads = (*IDENTITIES, *CASTS, *DROPOUT)
_HEADS: Overloads = (*RESHAPE, *PERMUTE, *IDENTITIES)

_ATTENDED = 0.25
"""The share of variance left after attention averages over tokens: as over four equal weights."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Mean and variance of each channel, float64[C] both."""

    mean: Tensor
    variance: Tensor


Compute = Callable[[GraphModule, Node, Sequence[Moments | None]], Moments | None]


@dataclass(frozen=True, slots=True)
class MomentRule:
    """The rule by which an operator changes moments.

    Args:
        reads: the nodes whose moments it needs; None if it is not said for this node.
        compute: its own from theirs.
        is_norm: the result is known also where theirs are not.
    """

    reads: Callable[[Node], Sequence[Node] | None]
    compute: Compute
    is_norm: bool = False


def quadrature(count: int) -> tuple[Tensor, Tensor]:
    """Points and weights of Gauss-Hermite quadrature for a standard normal, float64[count].

    By the eigenvalues of the polynomials' recurrence (Golub and Welsch 1969).

    >>> points, weights = quadrature(4)
    >>> round(float(points.square() @ weights), 6)
    1.0
    """
    beside = torch.arange(1, count, dtype=torch.float64).sqrt()
    points, vectors = torch.linalg.eigh(torch.diag(beside, 1) + torch.diag(beside, -1))
    return points, vectors[0].square()


def activation_input(node: Node) -> Node | None:
    """The input of an activation function, also of x * sigmoid(x); None for other nodes."""
    if is_call(node, ACTIVATIONS):
        return node.all_input_nodes[0]
    if is_call(node, MUL):
        for gate in node.all_input_nodes:
            if is_call(gate, SIGMOID) and gate.all_input_nodes[0] in node.all_input_nodes:
                return gate.all_input_nodes[0]
    return None


def apply_activation(node: Node, values: Tensor) -> Tensor:
    """Apply the function of a node that has an `activation_input` to values."""
    if is_call(node, MUL):
        return values * torch.sigmoid(values)
    target = node.target
    assert callable(target)  # a call_function node
    made: Tensor = target(values, *node.args[1:], **node.kwargs)
    return made


def _uncast(node: Node) -> Node:
    while is_call(node, (aten.to.dtype, aten._to_copy.default)):
        node = node.all_input_nodes[0]
    return node


def rule_of(node: Node, roots: Collection[Node]) -> MomentRule | None:
    """Return the rule by which a node's operator changes moments; None where it has none.

    Args:
        node: of a graph.
        roots: of the graph's norms, as `find_roots` gives them.
    """
    if is_normalized(node, roots):
        return MomentRule(partial(_normalized_input, roots), _normalized_by_root, is_norm=True)
    if activation_input(node) is not None:
        return _ACTIVATION
    for overloads, rule in _RULES:
        if is_call(node, overloads):
            return rule
    return None


def _input_alone(node: Node) -> Sequence[Node]:
    return node.all_input_nodes[:1]


def _linear(gm: GraphModule, node: Node, given: Sequence[Moments | None]) -> Moments | None:
    source, bias = given[0], argument(node, "bias")
    weight = constant_of(gm, argument(node, "weight"))
    shift = None if bias is None else constant_of(gm, bias)
    if source is None or weight is None or (bias is not None and shift is None):
        return None
    if weight.dim() != 2 or weight.shape[1] != len(source.mean):
        return None
    weight = weight.float()  # the sums are estimates: half the time of float64
    mean = (weight @ source.mean.float()).double()
    variance = (weight.square() @ source.variance.float()).double()
    return Moments(mean if shift is None else mean + shift.double(), variance)


def _activation(gm: GraphModule, node: Node, given: Sequence[Moments | None]) -> Moments | None:
    if given[0] is None:
        return None
    points, weights = quadrature(32)
    values = given[0].mean[:, None] + given[0].variance.sqrt()[:, None] * points
    values = apply_activation(node, values)
    mean = values @ weights
    return Moments(mean, (values.square() @ weights - mean.square()).clamp(min=0.0))


def _normalised(width: int, given: Moments | None, *, centred: bool) -> Moments:
    """A row divided by its root mean square, less its mean before where it is centred."""
    if given is None:
        return Moments(torch.zeros(width).double(), torch.ones(width).double())
    mean = given.mean - given.mean.mean() if centred else given.mean
    spread = (mean.square() + given.variance).mean().clamp(min=1e-12)
    return Moments(mean / spread.sqrt(), given.variance / spread)


def _scaled(moments: Moments, factor: Tensor | float) -> Moments:
    return Moments(moments.mean * factor, moments.variance * factor**2)


def _vector(gm: GraphModule, node: Node, width: int) -> Tensor | None:
    """A constant with one number a channel, or with one for all."""
    value = constant_of(gm, node)
    if value is None or value.numel() not in (1, width):
        return None
    if value.numel() == width and value.dim() and value.shape[-1] != width:
        return None
    return value.double().flatten()


def _norm(gm: GraphModule, node: Node, given: Sequence[Moments | None]) -> Moments | None:
    shape = argument(node, "normalized_shape")
    if len(shape) != 1 or not isinstance(width := shape[0], int):
        return None
    centred = is_call(node, LAYER_NORM)
    found = _normalised(width, given[0], centred=centred)
    for name in ("weight", "bias") if centred else ("weight",):
        constant = argument(node, name)
        if constant is None:
            continue
        value = _vector(gm, constant, width)
        if value is None:
            return None
        if name == "weight":
            found = _scaled(found, value)
        else:
            found = Moments(found.mean + value, found.variance)
    return found


def _normalized_input(roots: Collection[Node], node: Node) -> Sequence[Node]:
    return [operand for operand in node.all_input_nodes if operand not in roots]


def _normalized_by_root(
    gm: GraphModule, node: Node, given: Sequence[Moments | None]
) -> Moments | None:
    width = node.meta["val"].shape[-1]
    if not given or not isinstance(width, int):
        return None
    return _normalised(width, given[0], centred=False)


def _computed(node: Node) -> Sequence[Node]:
    """The inputs of an addition or product that are no constants, in order."""
    return [source for source in node.all_input_nodes if source.op != "get_attr"]


def _combined(gm: GraphModule, node: Node, given: Sequence[Moments | None]) -> Moments | None:
    is_sum = is_call(node, ADD)
    known = [moments for moments in given if moments is not None]
    if not known or (is_sum and argument(node, "alpha") != 1):
        return None
    if len({len(moments.mean) for moments in known}) > 1:
        return None
    found = known[0]
    for other in known[1:]:
        found = _sum(found, other) if is_sum else _product(found, other)
    operands = (argument(node, "self"), argument(node, "other"))
    if len(known) == 1 and operands[0] is operands[1]:
        return None
    for operand in operands:
        if isinstance(operand, Node) and operand.op != "get_attr":
            continue
        value = _vector(gm, operand, len(found.mean)) if isinstance(operand, Node) else operand
        if value is None:
            return None
        found = Moments(found.mean + value, found.variance) if is_sum else _scaled(found, value)
    return found


def _sum(a: Moments, b: Moments) -> Moments:
    return Moments(a.mean + b.mean, a.variance + b.variance)


def _product(a: Moments, b: Moments) -> Moments:
    variance = a.variance * (b.variance + b.mean.square()) + a.mean.square() * b.variance
    return Moments(a.mean * b.mean, variance)


def _attended(node: Node) -> Sequence[Node] | None:
    """The values that attention averages to make this tensor, channels in the same order.

    Through a transposition of tokens and heads on either side: heads stand beside each other.
    """
    inner = _behind_heads(node)
    if is_call(inner, SDPA):
        values = argument(inner, "value")
    elif is_call(inner, MATMUL):
        values = argument(inner, "other")
    else:
        return None
    source = _behind_heads(values)
    same = source.meta["val"].shape[-1] == node.meta["val"].shape[-1]
    return [source] if same and is_call(source, LINEAR) else None


def _behind_heads(node: Node) -> Node:
    while is_call(node, _HEADS):
        node = node.all_input_nodes[0]
    return node


def _averaged(gm: GraphModule, node: Node, given: Sequence[Moments | None]) -> Moments | None:
    found = given[0]
    return None if found is None else Moments(found.mean, found.variance * _ATTENDED)


def _same(gm: GraphModule, node: Node, given: Sequence[Moments | None]) -> Moments | None:
    return given[0]


_ACTIVATION = MomentRule(lambda node: [activation_input(node) or node], _activation)
_RULES: tuple[tuple[Overloads, MomentRule], ...] = (
    (LINEAR, MomentRule(_input_alone, _linear)),
    (FEATURE_NORMS, MomentRule(_input_alone, _norm, is_norm=True)),
    (ADD + MUL, MomentRule(_computed, _combined)),
    (_PASSED_ON, MomentRule(_input_alone, _same)),
    (RESHAPE, MomentRule(_attended, _averaged)),
)


class ChannelMoments:
    """The moments of a graph's tensors along their last axis, each computed when first asked for.

    Args:
        gm: its constants must stay as they are while this is asked.
    """

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.roots = find_roots(gm.graph)
        self._found: dict[Node, Moments | None] = {}

    def of(self, node: Node) -> Moments | None:
        """The moments of a node's value, None if nothing is known of it."""
        stack = [node]  # not recursion: a residual stream is as deep as the model
        while stack:
            top = stack[-1]
            if top in self._found or (source := self._missing(top)) is None:
                stack.pop()
            else:
                stack.append(source)
        return self._found[node]

    def is_norm(self, node: Node) -> bool:
        """True if a node is a norm, as an operator or as the product that one ends with."""
        if is_call(node, FEATURE_NORMS):
            return True
        inputs = node.all_input_nodes
        return is_call(node, MUL) and any(is_normalized(_uncast(n), self.roots) for n in inputs)

    def _missing(self, node: Node) -> Node | None:
        """A node to look at first; None when this one's moments were found."""
        rule = rule_of(node, self.roots)
        sources = None if rule is None else rule.reads(node)
        if rule is None or sources is None:
            self._found[node] = None
            return None
        for source in sources:
            if source not in self._found:
                return source
            if self._found[source] is None and not rule.is_norm:
                self._found[node] = None
                return None
        self._found[node] = rule.compute(self.gm, node, [self._found[s] for s in sources])
        return None
