"""Operators that the CPU backend keeps float although oneDNN could run them in integers.

A max-pool or a cat on uint8 moves a quarter of the bytes; but away from convolutions and linears it
costs a quantize before it and a dequantize behind it. Products whose class of sizes measured slower
than float stay float as well, and so do those that `place_by_speed` timed on this machine.

A product between two integer ones needs no quantize; one between float operators does. So
`place_by_speed` compares whole regions: a layer leaves its region where that makes the whole
cheaper, and a region stays float where it is not faster than float with the quantizes at its
borders counted.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from pt2e_quant.backends.target.policy import SPECTRA, Policy, Regions, slower_preference
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.core.recurrent_ops import Cell, Rounding, gate_count
from pt2e_quant.core.schemes import Role
from pt2e_quant.graph import ops
from pt2e_quant.graph.op_table import ALLOWED_KEY, SLOWER, OpKind, OpRow, Preference
from pt2e_quant.graph.ops import CONV, LINEAR, argument, is_call
from pt2e_quant.graph.pattern import Match, find_matches, one_of
from pt2e_quant.graph.pipeline import HAS_VALUES, GraphPass, Note, PassResult
from pt2e_quant.kernels.int8_conv2d.read_conv import even_padding, per_axis
from pt2e_quant.kernels.kernel import Kernel
from pt2e_quant.kernels.onednn.post_ops import NO_POST_OP, post_op_of
from pt2e_quant.kernels.onednn.speed import measured_here
from pt2e_quant.kernels.product_trial.product import Operator, PostOpKind, Product
from pt2e_quant.kernels.product_trial.time_product import Times
from pt2e_quant.kernels.product_trial.verdicts import are_tried, times_of
from pt2e_quant.kernels.recurrent_layer.cpu import has_integer_layers
from pt2e_quant.kernels.registry import Registry
from pt2e_quant.kernels.shape_classes import expected_sizes
from pt2e_quant.passes.recurrent.split_recurrent import LayerSizes

SLOWER_KEY = "pt2e_quant.cpu.slower"
"""Key of an operator's `node.meta`: it was timed on this machine, and is slower in integers."""

_TIMED = frozenset({"int4_linear", "int8_conv2d", "int8_linear"})
"""Fused operators that were measured against float, by classes of sizes."""

_LEAST_LSTM = 2**18
"""Recurrent weights from which on torch's integer LSTM measured faster than oneDNN's float one: at
256 hidden values 1.0 to 1.5 times on one thread, at 512 1.6 to 3; at 128 0.7 times."""


def timed_kernels(registry: Registry) -> dict[str, Kernel]:
    """The kernels that were measured against float, by the names of their rows."""
    return {kernel.name: kernel for kernel in registry if kernel.op in _TIMED}


def policy_of(registry: Registry) -> Policy:
    """The policy for a registry's kernels."""
    kernels = timed_kernels(registry)

    def is_slower(row: OpRow, match: Match) -> bool:
        """True if a match was timed as slower, or its class of sizes measured below float."""
        kernel = kernels.get(row.name)
        if kernel is None:
            return False
        if SLOWER_KEY in match.nodes["op"].meta:
            return True
        return measured_here(kernel.op).get(kernel.shape_class(match), 1.0) < 1.0

    return Policy(
        rows=[kernel.row for kernel in registry],
        runs=_runs,
        at_output=lambda _: False,
        requantizes=True,
        exceptions=(
            (
                Preference(name="constant_inputs", text="inputs that are no constants"),
                _read_constants,
            ),
        ),
        of_matches=(
            SPECTRA,
            slower_preference(
                "leave it float, as layers so small gain nothing on this CPU, or quantize it "
                'all the same, with backend pq.backends.get("cpu").allowing_slower() '
                "(--allow-slower)",
                is_slower,
            ),
        ),
    )


def recurrent_form(
    sizes: LayerSizes, rounds_activations: bool, allowed: Collection[str]
) -> Rounding:
    """The rounding of a recurrent layer's operands where that is no slower than float."""
    has_integer_form = sizes.cell in (Cell.LSTM, Cell.GRU) and not sizes.has_projection
    if not rounds_activations or not has_integer_form or not has_integer_layers():
        return Rounding.NONE
    recurrent_weights = gate_count(sizes.cell) * sizes.hidden**2
    is_slower = sizes.cell is Cell.LSTM and recurrent_weights < _LEAST_LSTM
    return Rounding.NONE if is_slower and SLOWER not in allowed else Rounding.PER_TENSOR


def _runs(row: OpRow, match: Match) -> bool:
    """True if an entry takes a match of a float graph with static activations."""
    if any(accepted.is_dynamic for slot in row.slots for accepted in slot.accepts):
        return False  # what is quantized at run time is moved in float
    if any(slot.role is Role.INPUT and not slot.accepts for slot in row.slots):
        return False  # so is what stays float
    weights = [slot.at for slot in row.slots if slot.role is Role.WEIGHT]
    return row.refusal(match) is None and all(match.is_constant(at) for at in weights)


def _read_constants(regions: Regions) -> set[Node]:
    """Data movement of a constant."""
    return {
        anchor
        for anchor, (row, _) in regions.matches.items()
        if row.kind is OpKind.LIGHT and regions.constants & set(regions.inputs(anchor))
    }


_GEMMS = CONV + LINEAR
_DATA_MOVEMENT = one_of(
    ops.RESHAPE,
    ops.SQUEEZE,
    ops.UNSQUEEZE,
    ops.PERMUTE,
    ops.SLICE,
    ops.SELECT,
    ops.MAX_POOL2D,
)
_MARGIN = 0.25
"""A region in float must win this share of its time in integers: clocks scatter by less."""
_SPLIT_MARGIN = 0.5
"""A layer within a region must win more: float there adds operators, and each costs more in a model
than in a loop of its own. Three layers that won a tenth in a loop lost MobileNetV2 6 % of it."""


@dataclass(slots=True, eq=False)
class _Layer:
    """A product of a graph, its times, where its activations come from.

    Args:
        op: the convolution or linear.
        anchor: the last operator that is fused with it.
        source: the value that it reads, behind operators that move data.
        times: of one call.
        is_integer: as placed so far.
    """

    op: Node
    anchor: Node
    source: Node
    times: Times
    is_integer: bool = True


def place_by_speed(registry: Registry) -> GraphPass:
    """A pass that marks products which are slower in integers on this machine.

    Each distinct product is timed once a machine, in a child process. Without times nothing is
    marked: what the table says of classes of sizes counts.

    Before:  quantize → linear(64 x 64) → float operators
    After:   the same, the linear marked
    """

    def edit(gm: GraphModule) -> PassResult:
        for node in gm.graph.nodes:
            node.meta.pop(SLOWER_KEY, None)
        is_allowed = SLOWER in gm.meta.get(ALLOWED_KEY, ())
        layers = _timed_layers(gm, registry) if are_tried() and not is_allowed else []
        _leave_slower(layers)
        notes = []
        for layer in layers:
            if not layer.is_integer:
                layer.op.meta[SLOWER_KEY] = True
                notes.append(Note(layer.op.name, _reason(layer), skipped=True))
        told = provenance_of(gm).notes
        told.extend(f"{note.node}: {note.text}" for note in notes)
        if layers:
            told.append(_summary(layers))
        return PassResult(changed=False, notes=tuple(notes))

    return GraphPass("place_by_speed", edit, needs=(HAS_VALUES,), gives=())


def _summary(layers: list[_Layer]) -> str:
    placed = _Network(layers).total_us()
    in_float = sum(layer.times.float_us for layer in layers)
    return (
        f"{sum(layer.is_integer for layer in layers)} of {len(layers)} products in integers: all "
        f"take {placed:.0f} us with the quantizes in front of them, {in_float:.0f} us in float, in "
        "eager calls timed on this machine (compiled ones were not timed)"
    )


def _reason(layer: _Layer) -> str:
    times = layer.times
    return (
        f"float: measured on this machine {times.integer_us:.0f} us in integers and "
        f"{times.quantize_us:.0f} us to quantize what it reads, {times.float_us:.0f} us in float, "
        "in calls without a compiler"
    )


def _timed_layers(gm: GraphModule, registry: Registry) -> list[_Layer]:
    """Every product that would run in integers, where its times are known."""
    policy = policy_of(registry)

    def is_product(row: OpRow, match: Match) -> bool:
        op = match.nodes.get("op")
        is_gemm = op is not None and is_call(op, _GEMMS)
        return is_gemm and policy.takes(row, match)

    kernels = timed_kernels(registry).values()
    patterns = [(kernel.row, op) for kernel in kernels for op in kernel.row.find]
    matches = [match for _, match in find_matches(gm.graph, patterns, is_product)]
    products = {match.anchor: _product(match) for match in matches}
    times = times_of({product for product in products.values() if product is not None})
    return [
        _Layer(
            op=match.nodes["op"],
            anchor=match.anchor,
            source=_behind_data_movement(match.node("x")),
            times=times[product],
        )
        for match in matches
        if (product := products[match.anchor]) is not None and product in times
    ]


def _behind_data_movement(node: Node) -> Node:
    while is_call(node, _DATA_MOVEMENT) and isinstance(source := node.args[0], Node):
        node = source
    return node


def _product(match: Match) -> Product | None:
    """The product of a match, with sizes as in the example; None if they are not known."""
    op, weight = match.nodes["op"], match.node("w").meta["val"]
    sizes = expected_sizes(match.node("x").meta["val"].shape)
    if sizes is None or 0 in sizes:
        return None
    post_op = NO_POST_OP if match.anchor is op else post_op_of(match.anchor) or NO_POST_OP
    is_linear = is_call(op, LINEAR)
    window: dict[str, Any] = {} if is_linear else _window(op)
    return Product(
        operator=Operator.LINEAR if is_linear else Operator.CONV,
        x=sizes,
        weight=tuple(weight.shape),
        has_bias=isinstance(match.values.get("b"), Node),
        post_op=PostOpKind(name=post_op.name),
        **window,
    )


def _window(op: Node) -> dict[str, Any]:
    padding = even_padding(op)
    assert padding is not None  # a constraint says so
    return {
        "stride": tuple(per_axis(op, "stride")),
        "padding": tuple(padding),
        "dilation": tuple(per_axis(op, "dilation")),
        "groups": argument(op, "groups"),
    }


def _leave_slower(layers: list[_Layer]) -> None:
    """Take layers, then whole regions, out of the integers while that makes the graph cheaper."""
    network = _Network(layers)
    for alone in (True, False, True):
        while any([network.leave_if_slower(group) for group in network.groups(alone=alone)]):
            pass


class _Network:
    """The layers, their readers, and the cost of a placement."""

    def __init__(self, layers: list[_Layer]) -> None:
        self.layers = layers
        self._made_by = {layer.anchor: layer for layer in layers}
        self._readers: dict[Node, list[_Layer]] = {}
        for layer in layers:
            self._readers.setdefault(layer.source, []).append(layer)

    def total_us(self) -> float:
        """The time of all layers as they are placed, in microseconds."""
        return self._cost(list(dict.fromkeys([*self._made_by, *self._readers])))

    def groups(self, *, alone: bool) -> Iterator[list[_Layer]]:
        """Layers that are in integers: each alone, or those that hand integers on together."""
        left = [layer for layer in self.layers if layer.is_integer]
        while left:
            group = [left[0]] if alone else self._region(left[0])
            yield group
            left = [layer for layer in left if layer not in group]

    def leave_if_slower(self, group: list[_Layer]) -> bool:
        """Place layers in float where that is cheaper; whether it was."""
        group = [layer for layer in group if layer.is_integer]
        is_whole = bool(group) and len(self._region(group[0])) == len(group)
        margin = _MARGIN if is_whole else _SPLIT_MARGIN
        near = self._near(group)
        before = self._cost(near)
        for layer in group:
            layer.is_integer = False
        least_gain = margin * sum(layer.times.integer_us for layer in group)
        if group and before - self._cost(near) > least_gain:
            return True
        for layer in group:
            layer.is_integer = True
        return False

    def _near(self, group: list[_Layer]) -> list[Node]:
        """The values whose cost depends on where a group is placed."""
        return list(dict.fromkeys(v for layer in group for v in (layer.source, layer.anchor)))

    def _cost(self, values: list[Node]) -> float:
        """Microseconds of the layers that make or read values, and of quantizing those values."""
        found = {layer.op: layer for v in values for layer in self._readers.get(v, [])}
        found |= {made.op: made for v in values if (made := self._made_by.get(v)) is not None}
        products = sum(
            layer.times.integer_us if layer.is_integer else layer.times.float_us
            for layer in found.values()
        )
        return products + sum(self._quantize_cost(value) for value in values)

    def _quantize_cost(self, value: Node) -> float:
        """Nothing where an integer layer hands a value to integer layers alone."""
        readers = [layer for layer in self._readers.get(value, []) if layer.is_integer]
        if not readers:
            return 0.0
        made = self._made_by.get(value)
        if made is not None and made.is_integer and self._is_read_in_integers(value):
            return 0.0
        return max(layer.times.quantize_us for layer in readers)

    def _is_read_in_integers(self, value: Node) -> bool:
        ops_in_integers = {r.op for r in self._readers.get(value, []) if r.is_integer}
        seen = [value]
        while seen:
            for user in seen.pop().users:
                if is_call(user, _DATA_MOVEMENT):
                    seen.append(user)
                elif user not in ops_in_integers:
                    return False
        return True

    def _region(self, start: _Layer) -> list[_Layer]:
        found, seen = [], [start]
        while seen:
            layer = seen.pop()
            if layer in found or not layer.is_integer:
                continue
            found.append(layer)
            seen.extend(self._readers.get(layer.anchor, []))
            if (made := self._made_by.get(layer.source)) is not None:
                seen.append(made)
        return found
