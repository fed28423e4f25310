"""A q/dq graph whose quantized tensors are switched on one group at a time."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from pt2e_quant.accelerate.packed_convolutions import PackedConvolutions, channels_first
from pt2e_quant.analysis.differences import Differences, changed_value, whole_value
from pt2e_quant.analysis.graph_side import GraphSide, WeightSite
from pt2e_quant.core.qdq import (
    CHOOSE_QPARAMS_OPS,
    float_name,
    is_dequantize,
    is_qdq,
    is_quantize,
    required_attribute,
)
from pt2e_quant.flow.calibrate.sample import copied
from pt2e_quant.graph.meta import origin_name
from pt2e_quant.graph.ops import CONV, CONV_TRANSPOSE, LINEAR, argument, aten, is_call

Values: TypeAlias = dict[Node, Any]

KEPT_WEIGHT_BYTES = 2**29
"""Up to so many bytes of float weights, a program's rounded weights are kept between batches."""

_LAYERS = (*LINEAR, *CONV, *CONV_TRANSPOSE)

_ANY_LAYOUT = frozenset(
    (
        *(aten.conv2d.default, aten.add.Tensor, aten.mul.Tensor, aten.cat.default),
        *(aten.relu.default, aten.hardtanh.default, aten.sigmoid.default, aten.silu.default),
        *(aten.hardswish.default, aten.hardsigmoid.default, aten.max_pool2d.default),
        *(aten.avg_pool2d.default, aten.adaptive_avg_pool2d.default, aten.mean.dim),
    )
)
"""Operators that take feature maps with the channels last, as packed convolutions give them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """A unit that is quantized together: an operator with its inputs, its weights and its result.

    Args:
        name: of the operator in the float program.
        anchor: the operator.
        dequantizes: those of its inputs and weights, and of its result; and its bias itself, where
            that stays float and was corrected for them.
        weights: the dotted names of its weights.
    """

    name: str
    anchor: Node
    dequantizes: frozenset[Node]
    weights: tuple[str, ...]


class FloatTwin:
    """A q/dq graph that computes in float what is not switched on.

    A dequantize that is off gives what was quantized, and one of a weight the float weight.

    Args:
        side: the graph.
        weights: the float weights by name, in the units of the graph; and the biases that stay
            float and were corrected.
    """

    def __init__(self, side: GraphSide, weights: Mapping[str, Tensor]) -> None:
        self.gm: GraphModule = side.gm
        self.order = tuple(self.gm.graph.nodes)
        self.place = {node: at for at, node in enumerate(self.order)}
        constants = side.weights | float_biases(side)
        self.weight_names = {site.node: name for name, site in constants.items() if name in weights}
        self.float_weights = {node: weights[name] for node, name in self.weight_names.items()}
        self.bytes_of_weights = sum(value.nbytes for value in self.float_weights.values())
        self.groups = self._find_groups()
        self.writes_buffers = bool(side.capture.mutated_buffers)
        self._qparams = self._find_run_time_qparams()
        self._last_users = self._find_last_users()
        self._packed = PackedConvolutions()
        self._rounded_weights: Values = {}
        self._differences = None if self.writes_buffers else Differences()
        self._steps = [
            (self.place[node], node, quantized_source(node))
            for node in self.order
            if (node.op not in ("placeholder", "get_attr", "output") or node in self.weight_names)
            and not is_quantize(node)
            and node not in self._qparams
        ]

    def float_values(
        self, leaves: Sequence[Any], *, copies: bool = True, apart: bool = False
    ) -> Values:
        """The values of all nodes for one call, with nothing switched on.

        Args:
            leaves: of the call.
            copies: the graph is given copies, in case it writes into them.
            apart: dequantizes of one value give views of it, each with a gradient of its own.
        """
        given = iter(copied(leaves) if copies else leaves)
        values: Values = {}
        for node in self.order:
            if node.op == "placeholder":
                values[node] = next(given)
            elif node in self.float_weights:
                values[node] = self.float_weights[node]
            elif (source := quantized_source(node)) is not None:
                found = values[source]
                values[node] = found.view_as(found) if apart else found
            elif not is_quantize(node) and node not in self._qparams:
                values[node] = self._compute(node, values)
        return values

    def run(self, values: Values, active: Iterable[Node]) -> list[Any]:
        """The leaves of the result with some dequantizes switched on.

        Only what depends on these is computed; the rest is read off the float values.

        Args:
            values: of `float_values`, not changed.
            active: dequantizes.
        """
        on = frozenset(active)
        changed: Values = {}
        first = 0 if self.writes_buffers else min(map(self.place.__getitem__, on))
        for at, node, source in self._steps:
            if at < first:
                continue
            if node in on:
                changed[node] = self._switched_on(node, values, changed)
            elif source is not None:
                if source in changed:
                    changed[node] = changed[source]
            elif self.writes_buffers or any(n in changed for n in node.all_input_nodes):
                if node not in self.float_weights:
                    changed[node] = self._changed(node, values, changed)
            for done in self._last_users.get(node, ()):
                changed.pop(done, None)
        result = self._compute(self.gm.graph.output_node(), values, changed)
        return pytree.tree_leaves(result, is_leaf=lambda value: value is None)

    def rounded(self, node: Node, values: Values, changed: Values | None = None) -> Any:
        """Return the result of a dequantize that is switched on.

        Args:
            node: the dequantize.
            values: of `float_values`; may be empty for a weight.
            changed: values in place of these.
        """
        found = dict(changed or {})
        pending = [node]
        while pending:
            top = pending[-1]
            # No quantize and no scale that is chosen at run time is among the values.
            missing = [n for n in top.all_input_nodes if n not in found and n not in values]
            if missing:
                pending += missing
            else:
                found[pending.pop()] = self._compute(top, values, found)
        return found[node]

    def _switched_on(self, node: Node, values: Values, changed: Values) -> Any:
        """The result of a dequantize that is on; that of a weight is kept for the next batch."""
        if (kept := self._rounded_weights.get(node)) is not None:
            return kept
        found = changed_value(values[node], self.rounded(node, values, changed))
        if node in self.float_weights and self.bytes_of_weights <= KEPT_WEIGHT_BYTES:
            self._rounded_weights[node] = found
        return found

    def _changed(self, node: Node, values: Values, changed: Values) -> Any:
        if self._differences is None:
            return self._compute(node, values, changed)
        found = self._differences.follow(node, values, changed)
        if found is None:
            found = changed_value(values[node], self._compute(node, values, changed))
        return found

    def _compute(self, node: Node, values: Values, changed: Values | None = None) -> Any:
        known = changed or {}

        takes_any = node.target in _ANY_LAYOUT or is_qdq(node)

        def value(of: Node) -> Any:
            found = whole_value(known[of]) if of in known else values[of]
            return found if takes_any else channels_first(found)

        args: Any = map_arg(node.args, value)
        kwargs: Any = map_arg(node.kwargs, value)
        if node.op == "output":
            return args[0]
        if node.op == "get_attr":
            return required_attribute(self.gm, str(node.target))
        if node.op == "call_module":
            return self.gm.get_submodule(str(node.target))(*args, **kwargs)
        target: Any = node.target
        weight = node.args[1] if target is aten.conv2d.default else None
        if isinstance(weight, Node) and weight in self.float_weights:
            is_rounded = weight in known
            if not is_rounded or weight in self._rounded_weights:
                if (found := self._packed.run((weight, is_rounded), *args, **kwargs)) is not None:
                    return found
        return target(*args, **kwargs)

    def _find_groups(self) -> tuple[Group, ...]:
        found = []
        for node in self.order:
            read = [n for n in node.all_input_nodes if is_dequantize(n)]
            if node.op != "call_function" or is_qdq(node) or not read:
                continue
            weights = [self.weight_names[n] for n in read if n in self.weight_names]
            # A bias that stays float counts where it was corrected for what is read.
            read += [n for n in node.all_input_nodes if n in self.weight_names and n not in read]
            found.append(
                Group(
                    name=origin_name(node),
                    anchor=node,
                    dequantizes=frozenset({*read, *_result_of(node)}),
                    weights=tuple(weights),
                )
            )
        return _joined(found)

    def _find_run_time_qparams(self) -> frozenset[Node]:
        """Scales and zero points that are chosen at run time, which only q/dq read."""
        chosen = [node for node in self.order if node.target in CHOOSE_QPARAMS_OPS]
        parts = [[node, *node.users] for node in chosen]
        return frozenset(
            node
            for every in parts
            for node in every
            if all(is_qdq(user) or user in every for member in every for user in member.users)
        )

    def _find_last_users(self) -> dict[Node, list[Node]]:
        found: dict[Node, list[Node]] = {}
        kept = {*self.gm.graph.output_node().all_input_nodes}
        for node in self.order:
            # A quantize hands on the float value at its dequantizes.
            users = {
                u for user in node.users for u in (user.users if is_quantize(user) else [user])
            }
            if users and node not in kept:
                found.setdefault(max(users, key=self.place.__getitem__), []).append(node)
        return found


def float_biases(side: GraphSide) -> dict[str, WeightSite]:
    """The biases that stay float beside a weight in integers, by name."""
    found = {}
    for weight in side.weights.values():
        layer = weight.reader
        bias = argument(layer, "bias") if is_call(layer, _LAYERS) else None
        if is_dequantize(weight.node) and isinstance(bias, Node) and bias.op == "get_attr":
            name = float_name(bias)
            found[name] = WeightSite(name, bias, layer, None)
    return found


def quantized_source(node: Node) -> Node | None:
    """The float value behind a dequantize of an activation; None for all else."""
    quantize = node.args[0] if is_dequantize(node) else None
    if not isinstance(quantize, Node) or not is_quantize(quantize):
        return None
    source = quantize.args[0]
    return source if isinstance(source, Node) else None


def _result_of(node: Node) -> set[Node]:
    """The dequantizes of what an operator makes, through operators that read no dequantize."""
    found: set[Node] = set()
    todo = [node]
    while todo:
        for user in todo.pop().users:
            if is_quantize(user):
                found |= {reader for reader in user.users if is_dequantize(reader)}
            elif user.op == "call_function" and len(user.all_input_nodes) == 1:
                todo.append(user)
    return found


def _joined(groups: Sequence[Group]) -> tuple[Group, ...]:
    """One group for each name: what one operator of the program was made into."""
    by_name: dict[str, Group] = {}
    for group in groups:
        before = by_name.get(group.name)
        by_name[group.name] = Group(
            name=group.name,
            anchor=group.anchor if before is None else before.anchor,
            dequantizes=group.dequantizes | (before.dequantizes if before else frozenset()),
            weights=(*(before.weights if before else ()), *group.weights),
        )
    return tuple(by_name.values())
