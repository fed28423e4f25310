"""Additive masks that are made of booleans, as the booleans."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.ops import ADD, MASKED_FILL, SDPA, VIEWS, arguments, aten, is_call
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass

_HIDES = -1e9
"""From here on an added number hides a score."""

_Write = Callable[[], Node]


@graph_pass(needs=(HAS_VALUES,), gives=())
def boolean_masks(gm: GraphModule) -> PassResult:
    """Give attention booleans where its mask adds 0 or hides.

    `nn.MultiheadAttention` adds a mask that it makes of its `key_padding_mask`. A row that sees
    nothing gives zeros then; with the mask added it gave NaN.

    Before:  attention(q, k, v, view(masked_fill(zeros_like(m), m, -inf)))
    After:   attention(q, k, v, view(logical_not(m)))
    """
    editor = Editor(gm)
    notes = []
    for node in [n for n in gm.graph.nodes if is_call(n, SDPA)]:
        mask = arguments(node)["attn_mask"]
        if not isinstance(mask, Node) or not mask.meta["val"].is_floating_point():
            continue
        write = _Finder(editor, node).seen(mask)
        if write is None:
            notes.append(Note(node.name, "its mask adds more than 0 and -inf", skipped=True))
            continue
        node.replace_input_with(mask, write())
        editor.changed = True
        editor.erase_dead([mask])
        notes.append(Note(node.name, "its mask is of booleans"))
    return PassResult(editor.finish(), tuple(notes))


class _Finder:
    """Finds how the scores that a mask leaves are told by booleans.

    Args:
        editor: of the graph.
        reader: in front of which they are made.
    """

    def __init__(self, editor: Editor, reader: Node) -> None:
        self.editor, self.reader = editor, reader

    def seen(self, mask: Node) -> _Write | None:
        """Return a writer of booleans, True where the mask adds 0; None if it adds other values."""
        constant = constant_of(self.editor.gm, mask)
        if constant is not None:
            return self._of_constant(mask, constant)
        if is_call(mask, VIEWS) and len(mask.all_input_nodes) == 1:
            inner = self.seen(mask.all_input_nodes[0])
            return None if inner is None else lambda: self._viewed(mask, inner())
        if is_call(mask, ADD) and arguments(mask)["alpha"] == 1:
            return self._of_sum(*(arguments(mask)[name] for name in ("self", "other")))
        if is_call(mask, MASKED_FILL):
            return self._of_filled(*(arguments(mask)[n] for n in ("self", "mask", "value")))
        return None

    def _of_constant(self, mask: Node, values: Tensor) -> _Write | None:
        seen = values == 0
        if not bool((seen | (values <= _HIDES)).all()):
            return None
        return lambda: self.editor.constant(f"{mask.name}_seen", seen, like=self.reader)

    def _of_sum(self, left: Any, right: Any) -> _Write | None:
        parts = [self.seen(part) if isinstance(part, Node) else None for part in (left, right)]
        first, second = parts
        if first is None or second is None:
            return None
        return lambda: self._call(aten.logical_and.default, first(), second())

    def _of_filled(self, filled: Node, mask: Node, value: Any) -> _Write | None:
        held = constant_of(self.editor.gm, value) if isinstance(value, Node) else value
        number = held.item() if isinstance(held, Tensor) else held
        if not isinstance(number, (int, float)) or number > _HIDES or not self._is_zero(filled):
            return None
        if mask.meta["val"].shape != filled.meta["val"].shape:
            return None
        return lambda: self._call(aten.logical_not.default, mask)

    def _is_zero(self, node: Node) -> bool:
        if node.target in (aten.zeros.default, aten.zeros_like.default):
            return True
        values = constant_of(self.editor.gm, node)
        return values is not None and not bool(torch.any(values))

    def _viewed(self, view: Node, seen: Node) -> Node:
        return self._call(view.target, seen, *view.args[1:], **view.kwargs)

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return self.editor.call(target, *args, like=self.reader, before=self.reader, **kwargs)
