"""Values that quantizing a group changes, followed as differences from the float model's.

A convolution of `x + d` is that of `x`, which is known, and that of `d`. Of `d` a few digits are
enough: rounding it to bfloat16 changes what arrives at the results by some 0.1 % of itself, and
costs half the time of float32.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import Node

from pt2e_quant.accelerate.bfloat16_products import BFloat16Products
from pt2e_quant.accelerate.packed_convolutions import channels_first
from pt2e_quant.graph.ops import aten


class Changed:
    """A value that quantizing a group changes: all of it, or its difference; each made on demand.

    Args:
        base: float[...], the value of the float model.
        whole: float[...]; None where `difference` is given.
        difference: bfloat16[...], whole - base.
    """

    __slots__ = ("_difference", "_whole", "base")

    def __init__(
        self, base: Tensor, whole: Tensor | None = None, difference: Tensor | None = None
    ) -> None:
        self.base = base
        self._whole = whole
        self._difference = difference

    @property
    def is_difference(self) -> bool:
        """Whether the difference is known."""
        return self._difference is not None

    def whole(self) -> Tensor:
        """Return the value itself."""
        if self._whole is None:
            assert self._difference is not None
            self._whole = self.base + self._difference
        return self._whole

    def difference(self) -> Tensor:
        """Return the value less the float model's."""
        if self._difference is None:
            assert self._whole is not None
            self._difference = (self._whole - self.base).bfloat16()
        return self._difference


def changed_value(base: Any, whole: Any) -> Any:
    """Return a value to follow: `whole` itself where it has no difference from `base`."""
    tensors = isinstance(base, Tensor) and isinstance(whole, Tensor)
    if tensors and base.dtype is whole.dtype is torch.float32 and base.shape == whole.shape:
        return Changed(base, whole)
    return whole


def whole_value(value: Any) -> Any:
    """Return the value of what `changed_value` made."""
    return value.whole() if isinstance(value, Changed) else value


class Differences:
    """Makes differences of results from differences of operands, where an operator allows it."""

    def __init__(self) -> None:
        self.products = BFloat16Products()
        self._limits: dict[Node, tuple[Tensor, Tensor, Tensor]] = {}

    def follow(
        self, node: Node, values: Mapping[Node, Any], changed: Mapping[Node, Any]
    ) -> Changed | None:
        """Return the result of an operator as a difference; None where it is to be computed whole.

        Args:
            node: the operator.
            values: of the float model.
            changed: what is not as in these.
        """
        rule = _RULES.get(node.target) if self.products.is_on else None
        base = values.get(node)
        if rule is None or not isinstance(base, Tensor) or base.dtype is not torch.float32:
            return None
        difference = rule(self, node, values, changed)
        return None if difference is None else Changed(base, difference=difference)

    def limits(self, node: Node, base: Tensor) -> tuple[Tensor, Tensor]:
        """Return min(x, 0) and -max(x, 0) of the operand of a relu, kept for the next group."""
        held = self._limits.get(node)
        if held is None or held[0] is not base:
            below = base.clamp(max=0).bfloat16()
            held = self._limits[node] = (base, below, base.clamp(min=0).neg().bfloat16())
        return held[1], held[2]


_Rule: TypeAlias = Callable[
    [Differences, Node, Mapping[Node, Any], Mapping[Node, Any]], Tensor | None
]


def _operand(node: Node, changed: Mapping[Node, Any]) -> Changed | None:
    """The first operand, where it is all that changes."""
    found = [operand for operand in node.all_input_nodes if operand in changed]
    operand = changed[found[0]] if found == [node.args[0]] else None
    return operand if isinstance(operand, Changed) else None


def _conv2d(
    self: Differences, node: Node, values: Mapping[Node, Any], changed: Mapping[Node, Any]
) -> Tensor | None:
    operand = _operand(node, changed)
    weight: Any = node.args[1]
    groups = node.args[6] if len(node.args) > 6 else 1
    if operand is None or node.kwargs or groups != 1 or operand.base.dim() != 4:
        return None
    rest: Any = node.args[3:]
    return self.products.conv2d(weight, operand.difference(), values[weight], *rest)


def _linear(
    self: Differences, node: Node, values: Mapping[Node, Any], changed: Mapping[Node, Any]
) -> Tensor | None:
    operand = _operand(node, changed)
    weight: Any = node.args[1]
    if operand is None or node.kwargs:
        return None
    return self.products.linear(weight, operand.difference(), values[weight])


def _relu(
    self: Differences, node: Node, values: Mapping[Node, Any], changed: Mapping[Node, Any]
) -> Tensor | None:
    operand = _operand(node, changed)
    if operand is None or not operand.is_difference:
        return None
    below, above = self.limits(node, operand.base)
    # relu(x + d) - relu(x): max(d, -x) of a positive x, max(d + x, 0) of another.
    return torch.maximum(operand.difference() + below, above)


def _add(
    self: Differences, node: Node, values: Mapping[Node, Any], changed: Mapping[Node, Any]
) -> Tensor | None:
    operands = [changed[n] for n in node.all_input_nodes if n in changed]
    follows = all(isinstance(o, Changed) for o in operands)
    if node.kwargs or not follows or not any(o.is_difference for o in operands):
        return None
    if any(o.base.shape != values[node].shape for o in operands) or len(node.args) != 2:
        return None
    if node.args[0] is node.args[1]:
        return None
    found: Tensor = operands[0].difference()
    return found + operands[1].difference() if operands[1:] else found


def _apply(
    self: Differences, node: Node, values: Mapping[Node, Any], changed: Mapping[Node, Any]
) -> Tensor | None:
    """A linear operator without constants does to a difference what it does to a value."""
    operand = _operand(node, changed)
    if operand is None or not operand.is_difference or len(node.all_input_nodes) > 1:
        return None
    target: Any = node.target
    found: Tensor = target(channels_first(operand.difference()), *node.args[1:], **node.kwargs)
    return found if found.dtype is torch.bfloat16 else None


_RULES: dict[Any, _Rule] = {
    aten.conv2d.default: _conv2d,
    aten.linear.default: _linear,
    aten.relu.default: _relu,
    aten.add.Tensor: _add,
    **dict.fromkeys(
        (
            *(aten.mean.dim, aten.adaptive_avg_pool2d.default, aten.avg_pool2d.default),
            *(aten.flatten.using_ints, aten.view.default, aten.reshape.default),
            *(aten.permute.default, aten.transpose.int, aten.unsqueeze.default),
            *(aten.select.int, aten.slice.Tensor, aten.squeeze.dim),
        ),
        _apply,
    ),
}
