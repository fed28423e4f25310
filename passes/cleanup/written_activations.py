"""Activation functions that a model writes out, as the operators that they are.

Models write swish, GELU or a leaky ReLU by hand, in code older than the operators or as papers
have them. Tables, algorithms and runtimes know the operators: written out, a network with a
hardswish took 2.1 to 3.1 times as long (`benchmarks/written_activations.py`).

A written function is known by its values, not by how it is written: what is computed element by
element from one tensor and numbers is evaluated at some points, and compared there with what the
operators give.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg

from pt2e_quant.graph.constant_values import ConstantValues
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import attribute
from pt2e_quant.graph.ops import (
    ACTIVATIONS,
    CASTS,
    FILLS,
    IDENTITIES,
    MASKED_FILL,
    WHERE,
    aten,
    fill_number,
    is_call,
)
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass

_HIGHEST = 6
"""Values above a call, each of which all that it reads comes from, that are tried as the input."""
_LARGEST = 24
"""Calls of a written function; the longest way to write a GELU has 12."""
_NEAR = 1e-4
"""How far a value may be from the operator's: some write sqrt(2 / pi) as 0.7978. The two GELUs are
4.7e-4 apart."""
_FAR = 60.0
"""Inputs from here on may overflow in what is written, as the exponential in a softplus does."""

_Options = dict[str, Any]
_ELEMENTWISE = {*CASTS, *MASKED_FILL, *WHERE, *IDENTITIES, *ACTIVATIONS, aten.log_sigmoid.default}
"""Operators that torch does not mark as elementwise, and are."""
_TOLD_APART = {"eq", "ne", "isnan", "isinf", "isfinite", "nan_to_num", "isneginf", "isposinf"}
"""Operators that treat single numbers in a way of their own, which points may miss."""
_STOPS_GRADIENTS = {"detach"}
"""Behind them a function has other gradients than its values tell."""
_OPERATORS: tuple[tuple[OpOverload, _Options], ...] = (
    (aten.relu.default, {}),
    (aten.silu.default, {}),
    (aten.hardswish.default, {}),
    (aten.hardsigmoid.default, {}),
    (aten.gelu.default, {}),
    (aten.gelu.default, {"approximate": "tanh"}),
    (aten.mish.default, {}),
    (aten.sigmoid.default, {}),
    (aten.tanh.default, {}),
    (aten.softplus.default, {}),
)
"""Activations without numbers of their own; with one, see `_fitted`."""
_NAMED = (*ACTIVATIONS, aten.mish.default, aten.softplus.default)


@graph_pass(needs=(HAS_VALUES,), gives=())
def name_activations(gm: GraphModule) -> PassResult:
    """Call activations by their operators where a model writes them out.

    Before:  x * sigmoid(x);  where(x > 0, x, 0.1 * x);  0.5 * x * (1 + erf(x / sqrt(2)))
    After:   silu(x);         leaky_relu(x, 0.1);        gelu(x)
    """
    editor = Editor(gm)
    functions = _Functions(gm)
    notes = []
    unread: set[Node] = set()
    for node in reversed(functions.calls):  # the largest function first
        if node.users and unread.issuperset(node.users):
            unread.add(node)
            continue
        found = functions.operator_of(node)
        if found is None:
            continue
        x, target, options = found
        made = editor.call(target, x, like=node, val=node.meta["val"], **options)
        editor.replace(node, made)
        unread.add(node)
        notes.append(Note(node.name, f"is written out: {target}"))
    return PassResult(editor.finish(), tuple(notes))


@dataclass
class _Functions:
    """What is computed element by element from one tensor and numbers.

    Args:
        gm: the graph, not edited while it is read.
    """

    gm: GraphModule
    calls: list[Node] = field(default_factory=list)
    _above: dict[Node, Node] = field(default_factory=dict)
    """The nearest value that all which a call reads comes from."""
    _depths: dict[Node, int] = field(default_factory=dict)
    _numbers: dict[Node, float | None] = field(default_factory=dict)
    _written: dict[tuple[Node, Node], int | None] = field(default_factory=dict)
    _known: ConstantValues | None = None

    def __post_init__(self) -> None:
        self.table = _Table()
        for node in self.gm.graph.nodes:
            above = self._join(node) if _is_elementwise(node) else None
            self._depths[node] = 0 if above is None else self._depths[above] + 1
            if above is not None:
                self._above[node] = above
                self.calls.append(node)

    def operator_of(self, node: Node) -> tuple[Node, OpOverload, _Options] | None:
        """The input of a written activation, its operator and options."""
        made = node.meta["val"]
        if not made.is_floating_point():
            return None
        for x in reversed(list(self._inputs_of(node))):
            if is_call(node, _NAMED) and node.args[0] is x:
                continue
            written = self._function(node, x, [_LARGEST])
            found = None if written is None else self.table.operator(written)
            read = x.meta["val"]
            if found and read.dtype == made.dtype and str(read.shape) == str(made.shape):
                return x, *found
        return None

    def _inputs_of(self, node: Node) -> Iterator[Node]:
        for _ in range(_HIGHEST):
            if node not in self._above:
                return
            node = self._above[node]
            yield node

    def _join(self, node: Node) -> Node | None:
        """The nearest value that all inputs come from; None for those of several, or of none."""
        inputs = node.all_input_nodes
        if not all(isinstance(n.meta.get("val"), Tensor) for n in inputs):
            return None
        if len(inputs) > 1:
            inputs = [n for n in inputs if self._number(n) is None]
        if not inputs:
            return None
        found = inputs[0]
        for other in inputs[1:]:
            while found is not other:
                if self._depths[found] < self._depths[other]:
                    found, other = other, found
                if found not in self._above:
                    return None
                found = self._above[found]
        return found

    def _number(self, node: Node) -> float | None:
        """The number that all elements of a tensor are, as far as the graph says it."""
        if node not in self._numbers:
            self._numbers[node] = self._number_of(node)
        return self._numbers[node]

    def _number_of(self, node: Node) -> float | None:
        target: Any = node.target
        if is_call(node, FILLS):
            number = fill_number(node)
            return float(number) if isinstance(number, (int, float)) else None
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or value.dim() > 1 or value.is_complex():
            return None  # the parts of a split are no one tensor
        if not statically_known_true(value.numel() == 1):
            return None
        self._known = self._known or ConstantValues(self.gm)
        if node not in self._known.nodes or any(
            self._number(n) is None for n in node.all_input_nodes
        ):
            return None
        held = attribute(self.gm, str(target)) if node.op == "get_attr" else None
        # What is trained is no number.
        return None if isinstance(held, nn.Parameter) else float(self._known.value(node))

    def _function(self, node: Node, x: Node, budget: list[int]) -> int | None:
        """The entry in the table for what a call computes; None if it is of too many calls."""
        if node is x:
            return _Table.INPUT
        key = node, x
        if key in self._written:
            return self._written[key]
        number = self._numbers.get(node)
        if number is not None:
            return self.table.number(number)
        budget[0] -= 1
        if budget[0] < 0:  # not noted: other functions that end elsewhere may be small enough
            return None
        given = {n: self._function(n, x, budget) for n in node.all_input_nodes}
        is_whole = None not in given.values()
        if is_whole or budget[0] >= 0:
            self._written[key] = self.table.call(node, given) if is_whole else None
        return self._written.get(key)


class _Table:
    """Functions of one input, each once, with their values at the points."""

    INPUT = 0

    def __init__(self) -> None:
        self._entries: dict[Any, int | None] = {}
        self._constants: dict[float, int] = {}
        self._values: list[Tensor] = [_points()]
        self._operators: dict[int, tuple[OpOverload, _Options] | None] = {}

    def operator(self, entry: int) -> tuple[OpOverload, _Options] | None:
        """The operator that a function is."""
        if entry not in self._operators:
            self._operators[entry] = _operator(self._values[entry])
        return self._operators[entry]

    def number(self, number: float) -> int:
        """The entry of a constant function."""
        if number not in self._constants:
            self._constants[number] = self._add(torch.tensor(number, dtype=torch.float64))
        return self._constants[number]

    def call(self, node: Node, given: Mapping[Node, int | None]) -> int | None:
        """The entry of a call of other entries; None if it cannot be computed."""
        is_cast = is_call(node, (*CASTS, *IDENTITIES))
        key = (
            node.target,
            node.meta["val"].dtype if is_cast else None,
            str(map_arg((node.args, node.kwargs), lambda n: f"entry {given[n]}")),
        )
        if key not in self._entries:
            value = self._computed(node, given, is_cast=is_cast)
            self._entries[key] = None if value is None else self._add(value)
        return self._entries[key]

    def _add(self, value: Tensor) -> int:
        self._values.append(value)
        return len(self._values) - 1

    def _computed(
        self, node: Node, given: Mapping[Node, int | None], *, is_cast: bool
    ) -> Tensor | None:
        values = {n: self._values[entry] for n, entry in given.items() if entry is not None}
        if is_cast:
            read: Any = node.args[0]
            source, dtype = values[read], node.meta["val"].dtype
            return source.double() if dtype.is_floating_point else source.to(dtype)
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        target: Any = node.target
        try:
            made: Tensor = target(*args, **kwargs)
        except RuntimeError:  # an integer function of what are floats here
            return None
        return made


@cache
def _points() -> Tensor:
    """Inputs close together around 0, and tiny and large ones, all distinct and sorted."""
    near = [step / 20 for step in range(-200, 201)]
    far = torch.logspace(-6, 4, 101, dtype=torch.float64).tolist()
    return torch.tensor(sorted({*near, *far, *(-x for x in far)}), dtype=torch.float64)


@cache
def _expected() -> tuple[tuple[OpOverload, _Options, Tensor], ...]:
    return tuple((op, options, op(_points(), **options)) for op, options in _OPERATORS)


@cache
def _places() -> tuple[int, ...]:
    """Of -1, 0.5 and 2 in the points."""
    return tuple(int((_points() == number).nonzero()) for number in (-1.0, 0.5, 2.0))


@cache
def _expected_there() -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(values[[*_places()]].tolist()) for _, _, values in _expected())


def _operator(values: Tensor) -> tuple[OpOverload, _Options] | None:
    """The operator that gives these values at the points."""
    if values.shape != _points().shape or not values.is_floating_point():
        return None
    there = [float(values[place]) for place in _places()]  # most functions differ there
    for (target, options, expected), numbers in zip(_expected(), _expected_there(), strict=True):
        is_like = all(abs(a - b) <= 2 * _NEAR for a, b in zip(there, numbers, strict=True))
        if is_like and _are_near(values, expected):
            return target, options
    for target, options in _fitted(values, there):
        if _are_near(values, target(_points(), **options)):
            return target, options
    return None


def _fitted(values: Tensor, there: list[float]) -> Iterator[tuple[OpOverload, _Options]]:
    """Activations with a number of their own, as values at some points tell it."""
    at_minus_one, at_half, at_two = there
    if -1.0 < at_minus_one < 0.0 and abs(at_two - 2.0) + abs(at_half - 0.5) < _NEAR:
        yield aten.leaky_relu.default, {"negative_slope": _rounded(-at_minus_one)}
        yield aten.elu.default, {"alpha": _rounded(at_minus_one / math.expm1(-1.0))}
    lowest, low, high, highest = (float(values[place]) for place in (0, 1, -2, -1))
    if lowest < highest and (lowest == low or high == highest):
        yield (
            aten.clamp.default,
            {
                "min": _rounded(lowest) if lowest == low else None,
                "max": _rounded(highest) if high == highest else None,
            },
        )


def _rounded(number: float) -> float:
    """A number that was computed, as people write it: 0.1 and not 0.09999999999."""
    return float(f"{number:.6g}")


def _are_near(found: Tensor, expected: Tensor) -> bool:
    points = _points().abs()
    near = (found - expected).abs() <= _NEAR * torch.maximum(expected.abs(), points.clamp(max=1))
    return bool((near | ((points >= _FAR) & ~found.isfinite())).all())


def _is_elementwise(node: Node) -> bool:
    """True for a call that computes each element from those at its place."""
    is_call_of_aten = node.op == "call_function" and isinstance(node.target, OpOverload)
    makes_tensor = isinstance(node.meta.get("val"), Tensor)
    return is_call_of_aten and makes_tensor and _computes_elements(node.target)


@cache
def _computes_elements(target: Any) -> bool:
    if target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    if target._schema.name.partition("::")[2] in _TOLD_APART | _STOPS_GRADIENTS:
        return False
    return torch.Tag.pointwise in target.tags or target in _ELEMENTWISE
