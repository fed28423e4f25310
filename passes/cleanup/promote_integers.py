"""Cast the integers that a function of real values reads, as torch does inside of it."""

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.ops import arguments, aten
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass

_OPERANDS = frozenset(
    {"self", "other", "input", "exponent", "min", "max", "end", "tensor1", "tensor2"}
)
"""Names of the operands that torch promotes; a condition or a mask stays what it is."""
_CASTS = frozenset({"aten::to", "aten::_to_copy", "aten::type_as"})


@graph_pass(needs=(HAS_VALUES,), gives=())
def promote_integers(gm: GraphModule) -> PassResult:
    """Cast the integer and bool operands of a function whose result is real.

    Runtimes do not: their functions take operands of one dtype, and torch's exporters forget it
    for some (`1.0 - mask`, `mask.clamp(0.5)`, `softmax(mask, dtype=torch.float32)`).

    Before:  rsub(mask, 1.0)                       mask: int64, the result: float32
    After:   rsub(to(mask, float32), 1.0)
    """
    editor, notes = Editor(gm), []
    for node in [n for n in gm.graph.nodes if _promotes(n)]:
        wanted = node.meta["val"].dtype
        operands = [v for name, v in arguments(node).items() if name in _OPERANDS]
        whole = [v for v in operands if isinstance(v, Node) and _is_whole(v.meta.get("val"))]
        for operand in dict.fromkeys(whole):
            cast = editor.call(aten.to.dtype, operand, wanted, like=operand, before=node)
            node.replace_input_with(operand, cast)
            editor.changed = True
            notes.append(Note(node.name, f"{operand.name} is cast to {wanted}"))
    return PassResult(editor.finish(), tuple(notes))


def _promotes(node: Node) -> bool:
    """True for a call of ATen that computes each element, or casts what it reduces."""
    target: Any = node.target
    found = node.meta.get("val")
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return False
    if not isinstance(found, Tensor) or not found.is_floating_point():
        return False
    if target._schema.name in _CASTS or target._schema.is_mutable:
        return False
    return torch.Tag.pointwise in target.tags or isinstance(
        arguments(node).get("dtype"), torch.dtype
    )


def _is_whole(value: Any) -> bool:
    return isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())
