"""Activations in int8 become uint8: the same integers, 128 more."""

import torch
from torch.fx import GraphModule, Node

from pt2e_quant.core.qdq import DequantizePerTensor, QuantizePerTensor
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.pipeline import Note, PassResult, graph_pass

__all__ = ["unsigned_activations"]

_SHIFT = 128


@graph_pass()
def unsigned_activations(gm: GraphModule) -> PassResult:
    """Add 128 to every integer of an activation's int8, and to its zero point.

    The real values are the same to the last bit. For kernels that multiply uint8 by int8: oneDNN
    runs int8 by int8 in a reference loop, a thousand times slower, or refuses it.

    Before:  dequantize(quantize(x, s, z, -128, 127, int8), s, z, -128, 127, int8)
    After:   dequantize(quantize(x, s, z + 128, 0, 255, uint8), s, z + 128, 0, 255, uint8)
    """
    editor = Editor(gm)
    notes = []
    for node in gm.graph.nodes:
        if node.target is not QuantizePerTensor or node.args[5] is not torch.int8:
            continue
        readers = list(node.users)
        if not readers or any(r.target is not DequantizePerTensor for r in readers):
            notes.append(Note(node.name, "something reads its integers", skipped=True))
            continue
        for qdq in (node, *readers):
            _shift(qdq)
        node.meta["val"] = editor.fake_like(node.meta["val"], torch.uint8)
        editor.changed = True
        notes.append(Note(node.name, "uint8"))
    return PassResult(changed=editor.finish(), notes=tuple(notes))


def _shift(node: Node) -> None:
    source, scale, zero_point, low, high, _, *rest = node.args
    node.args = (
        source,
        scale,
        *(int(value) + _SHIFT for value in (zero_point, low, high)),  # type: ignore[arg-type]  # literals by schema
        torch.uint8,
        *rest,
    )
