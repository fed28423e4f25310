"""Operators that choose the qparams of a tensor and quantize by them become one call."""

from collections.abc import Callable
from dataclasses import dataclass
from operator import getitem
from typing import Any, TypeAlias

from torch.fx import GraphModule, Node

from pt2e_quant.graph.alias import mutated_roots, roots
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.pipeline import Note, PassResult
from pt2e_quant.kernels.profiler_range import label_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Where qparams are chosen, and the call that chooses them and quantizes at once.

    Args:
        target: the operator; it takes a label.
        x: the tensor.
        arguments: what the operator takes behind it.
        results: how many it has.
        replaced: nodes, and which result stands for each.
    """

    target: Any
    x: Node
    arguments: tuple[object, ...]
    results: int
    replaced: tuple[tuple[Node, int], ...]


_Key: TypeAlias = tuple[object, Node, tuple[object, ...]]


def choose_at_once(gm: GraphModule, read: Callable[[Node], Choice | str | None]) -> PassResult:
    """Replace what `read` finds by its call.

    All that quantize one x alike read one call, unless something writes into x in between.

    Args:
        gm: is changed.
        read: of a node that chooses qparams: the choice, or why it stays; None of any other.
    """
    editor = Editor(gm)
    source_of = roots(gm.graph)
    written = mutated_roots(gm.graph)
    shared: dict[_Key, list[Node]] = {}
    notes: list[Note] = []
    for node in list(gm.graph.nodes):
        choice = read(node)
        if choice is None:
            continue
        if isinstance(choice, str):
            notes.append(Note(node.name, choice, skipped=True))
            continue
        x = choice.x
        key = (choice.target, x, choice.arguments)
        results = None if source_of.get(x, x) in written else shared.get(key)
        if results is None:
            results = shared[key] = _call(editor, choice, like=node)
            notes.append(Note(node.name, "chosen and quantized at once"))
        for old, place in choice.replaced:
            editor.replace(old, results[place])
        editor.discard([node])
    return PassResult(changed=editor.finish(), notes=tuple(notes))


def _call(editor: Editor, choice: Choice, *, like: Node) -> list[Node]:
    """The call in front of a node whose label and trace it takes, and a node for each result."""
    made = editor.call(
        choice.target, choice.x, *choice.arguments, label=label_of(like), like=like, before=like
    )
    return [editor.call(getitem, made, i, like=like, before=like) for i in range(choice.results)]


def quantizes_of(x: Node, qparams: list[Node], quantize: Any, dequantize: Any) -> list[Node]:
    """What quantizes x by qparams; empty if anything but that and its dequantize reads them.

    Args:
        x: the tensor that they are chosen for.
        qparams: the nodes of the scale and the zero point.
        quantize: the operator.
        dequantize: the operator.
    """
    readers = list(dict.fromkeys(user for part in qparams for user in part.users))
    found = [n for n in readers if n.target is quantize and n.args[0] is x]
    others = [n for n in readers if n not in found and n.target is not dequantize]
    return [] if others else found
