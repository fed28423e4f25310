"""Move an activation's integers, and its zero point, by 128: int8 to uint8 or back."""

import torch
from torch.fx import GraphModule, Node

from pt2e_quant.core.qdq import DequantizePerTensor, QuantizePerTensor
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass

_SHIFT = {torch.int8: 128, torch.uint8: -128}


def shift_activations(gm: GraphModule, found: torch.dtype) -> PassResult:
    """Change every int8 activation to uint8, or every uint8 one to int8.

    The real values are the same to the last bit.

    Args:
        gm: canonical.
        found: the dtype that is to go.
    """
    wanted = torch.uint8 if found is torch.int8 else torch.int8
    editor = Editor(gm)
    notes = []
    for node in gm.graph.nodes:
        if node.target is not QuantizePerTensor or node.args[5] is not found:
            continue
        readers = list(node.users)
        if not readers or any(r.target is not DequantizePerTensor for r in readers):
            notes.append(Note(node.name, "something reads its integers", skipped=True))
            continue
        for qdq in (node, *readers):
            _shift(qdq, _SHIFT[found], wanted)
        node.meta["val"] = editor.fake_like(node.meta["val"], wanted)
        editor.changed = True
        notes.append(Note(node.name, str(wanted).removeprefix("torch.")))
    return PassResult(changed=editor.finish(), notes=tuple(notes))


def _shift(node: Node, by: int, dtype: torch.dtype) -> None:
    source, scale, zero_point, low, high, _, *rest = node.args
    node.args = (
        source,
        scale,
        *(int(value) + by for value in (zero_point, low, high)),  # type: ignore[arg-type]  # literals by schema
        dtype,
        *rest,
    )


@graph_pass(needs=(HAS_VALUES,), gives=())
def signed_activations(gm: GraphModule) -> PassResult:
    """Subtract 128 from the integers and the zero point of each uint8 activation.

    For kernels that multiply int8 by int8.

    Before:  dequantize(quantize(x, s, z, 0, 255, uint8), s, z, 0, 255, uint8)
    After:   dequantize(quantize(x, s, z - 128, -128, 127, int8), s, z - 128, -128, 127, int8)
    """
    return shift_activations(gm, torch.uint8)


@graph_pass(needs=(HAS_VALUES,), gives=())
def unsigned_activations(gm: GraphModule) -> PassResult:
    """Add 128 to the integers and the zero point of each int8 activation.

    For kernels that multiply uint8 by int8: oneDNN runs int8 by int8 in a reference loop, a
    thousand times slower, or refuses it.

    Before:  dequantize(quantize(x, s, z, -128, 127, int8), s, z, -128, 127, int8)
    After:   dequantize(quantize(x, s, z + 128, 0, 255, uint8), s, z + 128, 0, 255, uint8)
    """
    return shift_activations(gm, torch.int8)
