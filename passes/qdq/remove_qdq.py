"""Turn a quantized graph back into a float program."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.core.qdq import DequantizePerTensor, is_dequantize, is_quantize
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.pipeline import HAS_VALUES, GraphPass, PassResult, graph_pass


@graph_pass(needs=(HAS_VALUES,), gives=())
def remove_qdq(gm: GraphModule) -> PassResult:
    """Remove the q/dq of activations, and store weights by their dequantized values.

    Bodies of control flow stay as they are.

    Before:  linear(dq(q(x)), dq(w_q))
    After:   linear(x, w)
    """
    editor = Editor(gm)
    for node in [n for n in gm.graph.nodes if is_dequantize(n)]:
        source = node.args[0]
        if not isinstance(source, Node):
            continue
        if is_quantize(source) and isinstance(real := source.args[0], Node):
            editor.replace(node, editor.now(real))
        elif constant_of(gm, source) is not None:
            fold_dequantize(gm, editor, node)
    return PassResult(editor.finish())


def keep_static_qdq(is_kept: Callable[[Node], bool]) -> GraphPass:
    """The pass that removes the static q/dq per tensor of activations that a target leaves out.

    Before:  add(dq(q(x)), dq(q(y)))
    After:   add(x, dq(q(y)))    where that of x is left out

    Args:
        is_kept: whether the target rounds there, of a dequantize.
    """

    def edit(gm: GraphModule) -> PassResult:
        editor = Editor(gm)
        for node in [n for n in gm.graph.nodes if n.target is DequantizePerTensor]:
            source: Any = node.args[0]
            if is_quantize(source) and not is_kept(node):
                editor.replace(node, editor.now(source.args[0]))
                editor.discard([source])
        return PassResult(editor.finish())

    return GraphPass("keep_static_qdq", edit, needs=(HAS_VALUES,), gives=())


def fold_dequantize(gm: GraphModule, editor: Editor, node: Node) -> None:
    """Replace a dq of a constant by the float values it gives."""
    target: Any = node.target
    args = [constant_of(gm, a) if isinstance(a, Node) else a for a in node.args]
    value: Tensor = target(*args, **node.kwargs)
    source = node.args[0]
    assert isinstance(source, Node)
    name = str(source.target) if source.op == "get_attr" else source.name
    held = editor.constant(f"{name.removesuffix('_q')}_dq", value.contiguous(), like=node)
    editor.replace(node, held)
