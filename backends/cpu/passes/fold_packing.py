"""Weights are packed once, when a module is made, instead of in every call."""

from torch.fx import GraphModule

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass
from pt2e_quant.kernels.int4_linear.few_rows_op import PackInt4
from pt2e_quant.kernels.int4_linear.pack_limbs_op import PackInt4Limbs
from pt2e_quant.kernels.onednn.operators import PackConv, PackLinear


@graph_pass(needs=(HAS_VALUES,), gives=())
def fold_packing(gm: GraphModule) -> PassResult:
    """Run the packing operators and keep their results, which are opaque to all but oneDNN.

    Before:  qlinear_pointwise(x, …, pack_onednn_linear(w, [4, 8]), …)
    After:   qlinear_pointwise(x, …, packed_linear, …)
    """
    editor = Editor(gm)
    notes = []
    for node in list(gm.graph.nodes):
        if node.target not in (PackLinear, PackConv, PackInt4, PackInt4Limbs):
            continue
        values = [constant_of(gm, a) if hasattr(a, "op") else a for a in node.args]
        packed = node.target(*values)
        name = editor.unique_name(f"packed_{node.name}")
        gm.register_buffer(name, packed, persistent=False)
        with gm.graph.inserting_before(node):
            held = gm.graph.create_node("get_attr", name)
        held.meta["val"] = node.meta["val"]
        editor.replace(node, held)
        notes.append(Note(node.name, "packed"))
    return PassResult(changed=editor.finish(), notes=tuple(notes))
