"""One call of an operator with several results, in place of operators that gave them one by one."""

from operator import getitem
from typing import Any

from torch.fx import Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.kernels.profiler_range import label_of

__all__ = ["one_launch"]


def one_launch(
    editor: Editor, target: Any, *arguments: Any, like: Node, results: int
) -> tuple[Node, ...]:
    """Insert a call before a node, and a node for each of its results.

    Args:
        editor: of the graph.
        target: the operator; it takes a label.
        arguments: what it takes besides.
        like: whose place, label and trace the call takes.
        results: how many it has.
    """
    made = editor.call(target, *arguments, label=label_of(like), like=like, before=like)
    return tuple(editor.call(getitem, made, i, like=like, before=like) for i in range(results))
