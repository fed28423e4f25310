"""Compute attention in bfloat16 where the rest of a program is float32."""

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.ops import SDPA, aten, is_call
from pt2e_quant.graph.pipeline import Note, PassResult, graph_pass

_OPERANDS = 3
"""query, key and value; a mask stays as it is, since attention takes a float32 one beside them."""


@graph_pass(needs=(), gives=())
def narrow_attention(gm: GraphModule) -> PassResult:
    """Cast query, key and value of float32 attention to bfloat16, and its result back.

    Its two products then run on a CPU's or GPU's bfloat16 matrix units; softmax is computed in
    float32 inside the operator. Casts err by at most 2^-9 of each value, int8 by that of a tensor's
    greatest. Attention in other dtypes is left alone.

    Before:  y = scaled_dot_product_attention(q, k, v, mask)
    After:   y = to(scaled_dot_product_attention(to(q, bf16), to(k, bf16), to(v, bf16), mask), f32)
    """
    editor = Editor(gm)
    notes = []
    for node in [n for n in gm.graph.nodes if is_call(n, SDPA)]:
        if all(_is_float32(value) for value in (node, *node.args[:_OPERANDS])):
            _narrow(editor, node)
        else:
            reason = "attention that is not float32 stays as it is"
            notes.append(Note(node.name, reason, skipped=True))
    return PassResult(changed=editor.finish(), notes=tuple(notes))


def _is_float32(value: object) -> bool:
    fake = value.meta.get("val") if isinstance(value, Node) else None
    return isinstance(fake, Tensor) and fake.dtype is torch.float32


def _narrow(editor: Editor, node: Node) -> None:
    def cast(value: object, dtype: torch.dtype) -> Node:
        return editor.call(aten.to.dtype, value, dtype, like=node, before=node)

    operands = [cast(value, torch.bfloat16) for value in node.args[:_OPERANDS]]
    rest, named = node.args[_OPERANDS:], dict[str, Any](node.kwargs)
    made = editor.call(node.target, *operands, *rest, like=node, before=node, **named)
    editor.replace(node, cast(made, torch.float32))
