"""Masks of softmax in one form, apart from what else is added to scores."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from pt2e_quant.graph.constant_values import ConstantValues
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import attribute
from pt2e_quant.graph.ops import (
    ADD,
    CASTS,
    DIV,
    MASKED_FILL,
    MUL,
    RESHAPE,
    SOFTMAX,
    UNSQUEEZE,
    WHERE,
    arguments,
    aten,
    is_call,
)
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass
from pt2e_quant.passes.attention.decompose_attention import additive_mask, masked_score
from pt2e_quant.passes.attention.mask_parts import MaskReader, Seen, Write

_REGROUPED = (*RESHAPE, *UNSQUEEZE)
_LOWEST = -1e9
"""Constant masks of 0 and such numbers are in the form already."""


@graph_pass(needs=(HAS_VALUES,), gives=())
def mask_softmax(gm: GraphModule) -> PassResult:
    """Add one mask, made of booleans, to the scores of each softmax, after everything else.

    Biases of positions become summands of the scores, which are data. Entries that hide
    (`hidden_entries`) do so as the lowest number does. A softmax moves in front of a view that
    keeps its rows if the mask is in front of the view.
    Masks that are made of other values than booleans and constants stay.

    Before:  softmax(masked_fill(scores + (bias + mask), hidden, -inf))
    After:   softmax((scores + bias) + (seen - 1) * big)
    """
    writer = _Writer(gm)
    calls = [n for n in gm.graph.nodes if is_call(n, SOFTMAX)]
    notes = [note for note in map(writer.write, calls) if note is not None]
    return PassResult(writer.editor.finish(), tuple(notes))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scores:
    """The input of a softmax: values, and where they are seen."""

    data: Write
    seen: Seen


class _Writer:
    def __init__(self, gm: GraphModule) -> None:
        self.editor = Editor(gm)
        self.masks = MaskReader(self.editor, ConstantValues(gm))
        self.additive: dict[Node, Node] = {}

    def write(self, softmax: Node) -> Note | None:
        """Rewrite the input of one softmax, if it has a mask that is not in the form yet."""
        self.masks.reader = softmax
        softmax = self._before_views(softmax)
        scores: Node = softmax.all_input_nodes[0]
        found = self._scores(scores)
        if found is None or found.seen is True or self._is_written(scores):
            return None
        if isinstance(found.seen, bool):
            return Note(softmax.name, "its mask hides every score", skipped=True)
        self.masks.reader = softmax
        seen, dtype = found.seen(), scores.meta["val"].dtype
        if seen not in self.additive:
            self.additive[seen] = self._additive(seen, dtype)
        data = found.data()
        if dtype != data.meta["val"].dtype:
            data = self._call(aten.to.dtype, data, dtype)
        total = self._call(aten.add.Tensor, data, self.additive[seen])
        softmax.replace_input_with(scores, total)
        self.editor.changed = True
        self.editor.erase_dead([scores])
        return Note(softmax.name, "its mask is of booleans")

    def _additive(self, seen: Node, dtype: torch.dtype) -> Node:
        if seen.op != "get_attr":
            return additive_mask(seen, dtype, self.editor)
        held = attribute(self.editor.gm, str(seen.target))
        low = torch.zeros_like(held, dtype=dtype).masked_fill(~held, masked_score(dtype))
        return self.editor.constant(f"{seen.name}_additive", low, like=seen)

    def _before_views(self, softmax: Node) -> Node:
        """The softmax, in front of the views that follow its mask."""
        while True:
            view: Node = softmax.all_input_nodes[0]
            if not is_call(view, _REGROUPED) or not _keeps_rows(view, softmax):
                return softmax
            inner = self._scores(view.all_input_nodes[0])
            if inner is None or inner.seen is True:
                return softmax
            named = arguments(softmax)
            rest = [value for name, value in named.items() if name not in ("self", "dim")]
            made = self._call(softmax.target, view.all_input_nodes[0], -1, *rest)
            target = aten.reshape.default if view.target is aten.view.default else view.target
            self.editor.replace(softmax, self._call(target, made, *view.args[1:]))
            self.editor.erase_dead([softmax])
            self.masks.reader = softmax = made

    def _is_written(self, scores: Node) -> bool:
        """True if this is data and a mask as this pass writes it, or a constant one."""
        if not is_call(scores, ADD) or arguments(scores)["alpha"] != 1:
            return False
        for data, mask in (scores.args[:2], scores.args[1::-1]):
            inner = self._scores(data)
            is_plain = inner is None or inner.seen is True
            if is_plain and isinstance(mask, Node) and self._is_plain_mask(mask):
                return True
        return False

    def _is_plain_mask(self, mask: Node) -> bool:
        parts = self.masks.parts(mask)
        if parts is None or parts.seen is True or parts.added is not None:
            return False
        if mask.op == "get_attr":
            held = self.masks.known.value(mask)
            return bool(((held == 0) | (held <= _LOWEST)).all())
        return is_call(mask, MUL) and bool(mask.args[1] == -masked_score(mask.meta["val"].dtype))

    def _scores(self, value: Any) -> _Scores | None:
        """The values and masks of scores, None of what is a mask or no node."""
        if not isinstance(value, Node) or value in self.masks.known.nodes:
            return None
        given = arguments(value) if value.op == "call_function" else {}
        if is_call(value, ADD) and given["alpha"] == 1:
            found = self._of_sum(value, given["self"], given["other"])
            found = found or self._of_sum(value, given["other"], given["self"])
            if found is not None:
                return found
        elif is_call(value, MASKED_FILL):
            by = self.masks.number(given["value"])
            inner = self._scores(given["self"])
            if inner is not None and by is not None and by.seen is False:
                hidden = self.masks.unless(given["mask"])
                return _Scores(data=inner.data, seen=self.masks.both(inner.seen, hidden))
        elif is_call(value, CASTS):
            inner = self._scores(given["self"])
            if inner is not None and inner.seen is not True:
                data, dtype = inner.data, value.meta["val"].dtype
                return _Scores(
                    data=lambda: self._call(aten.to.dtype, data(), dtype), seen=inner.seen
                )
        elif is_call(value, WHERE):
            return self._of_choice(given) or _Scores(data=lambda: value, seen=True)
        elif is_call(value, (*MUL, *DIV)) and isinstance(given["other"], (int, float)):
            inner = self._scores(given["self"])
            if inner is not None and inner.seen is not True and given["other"] > 0:
                data, factor = inner.data, given["other"]
                return _Scores(
                    data=lambda: self._call(value.target, data(), factor), seen=inner.seen
                )
        return _Scores(data=lambda: value, seen=True)

    def _of_sum(self, total: Node, scores: Any, addend: Any) -> _Scores | None:
        """The parts of a sum, None if the addend is not known."""
        parts = self.masks.parts(addend)
        inner = self._scores(scores) if parts is not None else None
        if parts is None or inner is None:
            return None
        if inner.seen is True and parts.seen is True:
            return _Scores(data=lambda: total, seen=True)
        data, added = inner.data, parts.added
        if added is not None:
            kept, bias = data, added
            data = lambda: self._call(aten.add.Tensor, kept(), bias())  # noqa: E731
        return _Scores(data=data, seen=self.masks.both(inner.seen, parts.seen))

    def _of_choice(self, given: dict[str, Any]) -> _Scores | None:
        condition: Node = given["condition"]
        by = self.masks.number(given["other"])
        inner = self._scores(given["self"])
        if inner is not None and by is not None and by.seen is False:
            seen = self.masks.both(inner.seen, lambda: condition)
            return _Scores(data=inner.data, seen=seen)
        by, inner = self.masks.number(given["self"]), self._scores(given["other"])
        if inner is not None and by is not None and by.seen is False:
            seen = self.masks.both(inner.seen, self.masks.unless(condition))
            return _Scores(data=inner.data, seen=seen)
        return None

    def _call(self, target: Any, *args: Any) -> Node:
        reader = self.masks.reader
        assert reader is not None
        return self.editor.call(target, *args, like=reader, before=reader)


def _keeps_rows(view: Node, softmax: Node) -> bool:
    """True if a softmax normalises the last dimension, which a view leaves as it is."""
    before, after = (n.meta["val"].shape for n in (view.all_input_nodes[0], view))
    if not before or arguments(softmax)["dim"] not in (-1, len(after) - 1):
        return False
    return str(before[-1]) == str(after[-1])
