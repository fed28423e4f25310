"""The q/dq that no operator took, in one pass over the data each."""

from typing import Any

import torch
from torch.fx import GraphModule, Node

from pt2e_quant.core.qdq import DequantizePerTensor, QuantizePerTensor
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.pipeline import Note, PassResult, graph_pass
from pt2e_quant.kernels.quantized_values import affine_of

__all__ = ["FULL_RANGES", "single_pass_qdq"]

aten: Any = torch.ops.aten

FULL_RANGES = {torch.uint8: (0, 255, torch.quint8), torch.int8: (-128, 127, torch.qint8)}


@graph_pass()
def single_pass_qdq(gm: GraphModule) -> PassResult:
    """Spell the q/dq that are left with torch's own quantized tensors, one pass over the data.

    Before:  quantize_per_tensor(x, …)
    After:   int_repr(quantize_per_tensor(x, …, quint8))

    The written-out form takes five passes. Both round half to even; they differ where x / scale
    lies within float rounding of a half, in three values of a million.
    """
    editor = Editor(gm)
    notes = []
    for node in list(gm.graph.nodes):
        affine = affine_of(node)
        source: Any = node.args[0] if affine is not None else None
        if affine is None or affine.dtype not in FULL_RANGES or not _is_plain(node):
            continue
        low, high, quantized = FULL_RANGES[affine.dtype]
        place: dict[str, Any] = {"like": node, "before": node, "val": node.meta["val"]}
        if node.target is QuantizePerTensor:
            held = editor.call(
                aten.quantize_per_tensor.default,
                source,
                affine.scale,
                affine.zero_point,
                quantized,
                **place,
            )
            made = editor.call(aten.int_repr.default, held, **place)
            if (affine.quant_min, affine.quant_max) != (low, high):
                limits = affine.quant_min, affine.quant_max
                made = editor.call(aten.clamp.default, made, *limits, **place)
        else:
            held = editor.call(
                aten._make_per_tensor_quantized_tensor.default,
                source,
                affine.scale,
                affine.zero_point,
                **place,
            )
            made = editor.call(aten.dequantize.self, held, **place)
        editor.replace(node, made)
        notes.append(Note(node.name, "one pass"))
    return PassResult(changed=editor.finish(), notes=tuple(notes))


def _is_plain(node: Node) -> bool:
    """Whether the float side is float32, which torch's quantized tensors need."""
    source: Any = node.args[0] if node.target is QuantizePerTensor else node
    is_known = node.target in (QuantizePerTensor, DequantizePerTensor)
    return is_known and source.meta["val"].dtype is torch.float32
