"""q/dq between two operators that one quantized operator is written as."""

from typing import Any

from torch.fx import Node

from pt2e_quant.core.qdq import DequantizePerTensor, QuantizePerTensor, is_dequantize
from pt2e_quant.graph.rewrite import Editor


def sole_quantize(node: Node) -> Node | None:
    """The static per-tensor quantize that is all that reads a node."""
    users = list(node.users)
    if len(users) == 1 and users[0].target is QuantizePerTensor:
        return users[0]
    return None


def between(editor: Editor, made: Node, anchor: Node) -> Node:
    """The value that the second of two operators reads from the first.

    When `anchor`, which the two stand for, is quantized, the first gets the same qparams: backends
    take an operator in integers only between a dq and a q of its own.
    """
    quantize = sole_quantize(anchor)
    inputs = anchor.all_input_nodes
    if quantize is None or not inputs or not all(is_dequantize(n) for n in inputs):
        return made
    qparams = quantize.args[1:]
    stored = editor.call(QuantizePerTensor, made, *qparams, like=anchor)
    return editor.call(DequantizePerTensor, stored, *qparams, like=anchor)


def own_dequantize(editor: Editor, x: Node) -> Node:
    """A copy of a dequantize, which has one reader; any other node itself."""
    kwargs: Any = x.kwargs
    return editor.call(x.target, *x.args, like=x, **kwargs) if is_dequantize(x) else x
