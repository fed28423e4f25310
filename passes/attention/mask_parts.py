"""What an expression that is added to scores hides, as booleans, and what it adds."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node

from pt2e_quant.graph.constant_values import ConstantValues
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.idioms.attention_masks import HIDES, hidden_entries
from pt2e_quant.graph.ops import (
    ADD,
    CASTS,
    CLAMP,
    FILLS,
    MASKED_FILL,
    MAXIMUM,
    MINIMUM,
    MUL,
    VIEWS,
    WHERE,
    arguments,
    aten,
    fill_number,
    is_call,
)

Write = Callable[[], Node]
"""Writes a value in front of the reader; of one value always the same node."""

Seen = Write | bool
"""The booleans that are True where a score is seen; one for all entries."""

_MOVES = (*VIEWS, aten.repeat.default, aten.tile.default, aten.repeat_interleave.self_int)
_TRIANGLES = (aten.triu.default, aten.tril.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskParts:
    """An addend of scores, in two parts.

    Attributes:
        seen: where it does not hide.
        added: what it adds there; None if it adds 0.
    """

    seen: Seen
    added: Write | None = None


@dataclass(frozen=True, slots=True)
class _Mapped:
    """A function of each value of a tensor of booleans or integers.

    `results` has those of False and True, or of 0 and 1: a mask of integers holds nothing else.
    """

    write: Write
    is_bool: bool
    results: Tensor


class MaskReader:
    """Reads the addends of one graph's scores.

    Args:
        editor: of the graph.
        known: its constants.
    """

    def __init__(self, editor: Editor, known: ConstantValues) -> None:
        self.editor, self.known = editor, known
        self.reader: Node | None = None
        """What reads the mask; nodes are written in front of it, once for all later readers."""
        self._parts: dict[Node, MaskParts | None] = {}

    def parts(self, value: Any) -> MaskParts | None:
        """The parts of an addend, None if it is not known to be made of booleans and constants."""
        if not isinstance(value, Node):
            return _of_number(value)
        if value not in self._parts:
            self._parts[value] = self._read(value)
        return self._parts[value]

    def _read(self, value: Node) -> MaskParts | None:
        if value in self.known.nodes:
            return self._of_constant(value)
        mapped = self._mapped(value)
        if mapped is not None:
            return self._of_mapped(mapped)
        if is_call(value, _MOVES) and len(value.all_input_nodes) == 1:
            return self._of_moved(value)
        if is_call(value, CASTS):
            inner = self.parts(value.args[0])
            return inner if inner is None or inner.added is None else None
        for operators, read in self._compounds():
            if is_call(value, operators):
                return read(arguments(value))
        if is_call(value, (*_TRIANGLES, *FILLS)):
            return self._of_made(value)
        return None

    def _compounds(self) -> tuple[tuple[Any, Callable[[dict[str, Any]], MaskParts | None]], ...]:
        return (
            (ADD, self._of_sum),
            (MASKED_FILL, self._of_filled),
            (WHERE, self._of_choice),
            (MUL, self._of_product),
            (MINIMUM, lambda given: self._of_both(given, self.both)),
            (MAXIMUM, lambda given: self._of_both(given, self.either)),
            (CLAMP, self._of_clamped),
        )

    def _of_constant(self, value: Node) -> MaskParts | None:
        held: Tensor = self.known.value(value)
        if not held.is_floating_point():
            return None
        hidden = hidden_entries(held)
        if bool(held.isposinf().any() | held.isnan().any()):
            return None
        rest = held.masked_fill(hidden, 0.0)
        added, is_mask = None, bool(hidden.any())
        if not is_mask:
            added = (lambda: value) if bool(rest.any()) else None
            return MaskParts(seen=True, added=added)
        if bool(rest.any()):
            added = self._once(lambda: self._constant(f"{value.name}_bias", rest))
        return MaskParts(
            seen=self._once(lambda: self._constant(f"{value.name}_seen", ~hidden)), added=added
        )

    def _mapped(self, value: Node) -> _Mapped | None:
        """A value as a function of booleans or integers."""
        fake = value.meta.get("val")
        if not isinstance(fake, Tensor):
            return None
        if not fake.is_floating_point():
            if value.op == "call_function" and fake.dtype is not torch.bool:
                inner = self._inner(value)
                if inner is not None:
                    return inner
            return _Mapped(
                lambda: value, fake.dtype is torch.bool, torch.tensor([0, 1]).to(fake.dtype)
            )
        return self._inner(value) if value.op == "call_function" else None

    def _inner(self, value: Node) -> _Mapped | None:
        sources, target = value.all_input_nodes, value.target
        if len(sources) != 1 or not isinstance(target, OpOverload):
            return None
        is_move = is_call(value, _MOVES)
        if not is_move and not is_call(value, CASTS) and torch.Tag.pointwise not in target.tags:
            return None
        inner = self._mapped(sources[0])
        if inner is None:
            return None
        if is_move:
            moved = self._once(
                lambda: self._call(target, *_with_first(value, inner.write()), **value.kwargs)
            )
            return _Mapped(moved, inner.is_bool, inner.results)
        if value.args[0] is not sources[0] or sources[0] in value.kwargs.values():
            return None
        results = target(inner.results, *value.args[1:], **value.kwargs)
        return _Mapped(inner.write, inner.is_bool, results)

    def _of_mapped(self, mapped: _Mapped) -> MaskParts | None:
        if not mapped.results.is_floating_point():
            return None
        first, second = (_of_number(number) for number in mapped.results.tolist())
        if first is None or second is None:
            return None
        if first.seen is second.seen:
            return first
        if mapped.is_bool:
            return MaskParts(
                seen=mapped.write if second.seen is True else self.negated(mapped.write)
            )
        compare = aten.ne.Scalar if second.seen is True else aten.eq.Scalar
        return MaskParts(seen=self._once(lambda: self._call(compare, mapped.write(), 0)))

    def _of_moved(self, value: Node) -> MaskParts | None:
        source = value.all_input_nodes[0]
        inner = self.parts(source)
        if inner is None or not isinstance(source.meta.get("val"), Tensor):
            return None
        shape = list(source.meta["val"].shape)
        is_alone = is_call(source, (*_MOVES, *CASTS, *_TRIANGLES))
        if not is_alone and not all(isinstance(size, int) for size in shape):
            return None  # its parts may be smaller than it is

        def moved(write: Write) -> Write:
            def written() -> Node:
                made = write()
                if list(made.meta["val"].shape) != shape and all(isinstance(s, int) for s in shape):
                    made = self._call(aten.expand.default, made, shape)
                return self._call(value.target, *_with_first(value, made), **value.kwargs)

            return self._once(written)

        added = None if inner.added is None else moved(inner.added)
        return MaskParts(
            seen=inner.seen if isinstance(inner.seen, bool) else moved(inner.seen), added=added
        )

    def _of_sum(self, given: dict[str, Any]) -> MaskParts | None:
        first, second = (self.parts(given[name]) for name in ("self", "other"))
        if first is None or second is None or given["alpha"] != 1:
            return None
        added = first.added or second.added
        if first.added is not None and second.added is not None:
            left, right = first.added, second.added
            added = self._once(lambda: self._call(aten.add.Tensor, left(), right()))
        return MaskParts(seen=self.both(first.seen, second.seen), added=added)

    def _of_both(
        self, given: dict[str, Any], join: Callable[[Seen, Seen], Seen]
    ) -> MaskParts | None:
        first, second = (self.parts(given[name]) for name in ("self", "other"))
        if first is None or second is None or first.added or second.added:
            return None
        return MaskParts(seen=join(first.seen, second.seen))

    def _of_filled(self, given: dict[str, Any]) -> MaskParts | None:
        filled, by = self.parts(given["self"]), self.number(given["value"])
        if filled is None or by is None:
            return None
        if by.seen is False:
            return MaskParts(
                seen=self.both(filled.seen, self.unless(given["mask"])), added=filled.added
            )
        if filled.added is not None:
            return None
        return MaskParts(seen=self.either(filled.seen, lambda: given["mask"]))

    def _of_choice(self, given: dict[str, Any]) -> MaskParts | None:
        first, second = (self.number(given[name]) for name in ("self", "other"))
        if first is None or second is None or first.added or second.added:
            return None
        condition: Node = given["condition"]
        kept = self.both(lambda: condition, first.seen)
        return MaskParts(seen=self.either(kept, self.both(self.unless(condition), second.seen)))

    def _of_product(self, given: dict[str, Any]) -> MaskParts | None:
        """A mask where booleans are true."""
        for mask, gate in (("self", "other"), ("other", "self")):
            parts, by = self.parts(given[mask]), given[gate]
            gated = self._mapped(by) if isinstance(by, Node) else None
            if parts is None or parts.added or gated is None or gated.results.tolist() != [0, 1]:
                continue
            seen = self._of_mapped(
                _Mapped(gated.write, gated.is_bool, torch.tensor([0.0, 2 * HIDES]))
            )
            return None if seen is None else MaskParts(seen=self.either(parts.seen, seen.seen))
        return None

    def _of_clamped(self, given: dict[str, Any]) -> MaskParts | None:
        low, high = given["min"], given["max"]
        keeps = isinstance(low, (int, float)) and low <= HIDES and high is None
        return self.parts(given["self"]) if keeps else None

    def _of_made(self, value: Node) -> MaskParts | None:
        """A tensor of one number of a size of run time, or a triangle of one."""
        if not is_call(value, _TRIANGLES):
            return _of_number(fill_number(value))
        given = arguments(value)
        inner = self.parts(given["self"])
        if inner is None or inner.added is not None or inner.seen is True:
            return inner if inner is None or inner.added is None else None
        hidden = self._hidden(given["self"], inner.seen)
        if hidden is None:
            return None
        kept = self._once(lambda: self._call(value.target, hidden(), given["diagonal"]))
        return MaskParts(seen=self.negated(kept))

    def _hidden(self, value: Node, seen: Seen) -> Write | None:
        """The booleans that a value hides, of its own size."""
        if not isinstance(seen, bool):
            return self.negated(seen)
        if value.target is not aten.full.default:
            return None
        size, rest = value.args[0], {"device": value.meta["val"].device}
        return self._once(
            lambda: self._call(aten.full.default, size, True, dtype=torch.bool, **rest)
        )

    def number(self, value: Any) -> MaskParts | None:
        """The parts of a number, which may be a constant of no dimensions, or of a tensor."""
        if isinstance(value, Node) and value in self.known.nodes:
            held = self.known.value(value)
            if held.dim() == 0:
                return _of_number(held.item())
        return self.parts(value)

    def both(self, left: Seen, right: Seen) -> Seen:
        """True where both are."""
        return self._joined(aten.logical_and.default, left, right, neutral=True)

    def either(self, left: Seen, right: Seen) -> Seen:
        """True where one is."""
        return self._joined(aten.logical_or.default, left, right, neutral=False)

    def unless(self, condition: Node) -> Write:
        """True where a tensor of booleans is False."""
        return self.negated(lambda: condition)

    def negated(self, seen: Write) -> Write:
        """True where these booleans are False."""
        return self._once(lambda: self._call(aten.logical_not.default, seen()))

    def _joined(self, target: Any, left: Seen, right: Seen, *, neutral: bool) -> Seen:
        if isinstance(left, bool):
            return right if left is neutral else left
        if isinstance(right, bool):
            return left if right is neutral else right
        return self._once(lambda: self._call(target, left(), right()))

    def _once(self, write: Write) -> Write:
        made: list[Node] = []

        def written() -> Node:
            if not made:
                made.append(write())
            return made[0]

        return written

    def _constant(self, name: str, values: Tensor) -> Node:
        assert self.reader is not None
        return self.editor.constant(name, values, like=self.reader)

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        assert self.reader is not None
        return self.editor.call(target, *args, like=self.reader, before=self.reader, **kwargs)


def _with_first(node: Node, first: Node) -> tuple[Any, ...]:
    return (first, *node.args[1:])


def _of_number(number: Any) -> MaskParts | None:
    if not isinstance(number, (int, float)) or not (number == 0 or number <= HIDES):
        return None
    return MaskParts(seen=number == 0)
