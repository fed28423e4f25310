"""Give the tensors that a cat joins one dtype, as ATen does inside of it."""

from typing import Any

from torch.fx import GraphModule

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.ops import Overloads, aten, is_call
from pt2e_quant.graph.pipeline import HAS_VALUES, PassResult, graph_pass

JOINS: Overloads = (
    *(aten.cat.default, aten.concat.default, aten.concatenate.default, aten.stack.default),
    *(aten.hstack.default, aten.vstack.default, aten.dstack.default, aten.column_stack.default),
)
"""Operators of a list of tensors, which runtimes take in one dtype alone."""


@graph_pass(needs=(HAS_VALUES,), gives=())
def promote_cats(gm: GraphModule) -> PassResult:
    """Cast the inputs of a cat that have not its result's dtype.

    Before:  cat([x, y])             x: float64, y: float32
    After:   cat([x, to(y, float64)])
    """
    editor = Editor(gm)
    for node in [n for n in gm.graph.nodes if is_call(n, JOINS)]:
        wanted = node.meta["val"].dtype
        parts: Any = node.args[0]
        for part in dict.fromkeys(parts):
            if part.meta["val"].dtype != wanted:
                cast = editor.call(aten.to.dtype, part, wanted, like=part, before=node)
                node.replace_input_with(part, cast)
                editor.changed = True
    return PassResult(editor.finish())
