"""Turn a quantized graph back into a float program."""

from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.core.qdq import is_dequantize, is_quantize
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.pipeline import HAS_VALUES, PassResult, graph_pass


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
