"""Additive masks that are made of booleans, as the booleans."""

from torch.fx import GraphModule, Node

from pt2e_quant.graph.constant_values import ConstantValues
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.ops import SDPA, arguments, is_call
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass
from pt2e_quant.passes.attention.mask_parts import MaskReader


@graph_pass(needs=(HAS_VALUES,), gives=())
def boolean_masks(gm: GraphModule) -> PassResult:
    """Give attention booleans where its mask adds 0 or hides.

    `nn.MultiheadAttention` adds a mask that it makes of its `key_padding_mask`. A row that sees
    nothing gives zeros then; with the mask added it gave NaN.

    Before:  attention(q, k, v, view(masked_fill(zeros_like(m), m, -inf)))
    After:   attention(q, k, v, view(logical_not(m)))
    """
    editor = Editor(gm)
    reader = MaskReader(editor, ConstantValues(gm))
    notes = []
    for node in [n for n in gm.graph.nodes if is_call(n, SDPA)]:
        mask = arguments(node)["attn_mask"]
        if not isinstance(mask, Node) or not mask.meta["val"].is_floating_point():
            continue
        reader.reader = node
        parts = reader.parts(mask)
        if parts is None or parts.added is not None or isinstance(parts.seen, bool):
            notes.append(Note(node.name, "its mask adds more than 0 and -inf", skipped=True))
            continue
        node.replace_input_with(mask, parts.seen())
        editor.changed = True
        editor.erase_dead([mask])
        notes.append(Note(node.name, "its mask is of booleans"))
    return PassResult(editor.finish(), tuple(notes))
