"""Give every reader of a quantized value its own dequantize."""

from torch.fx import GraphModule

from pt2e_quant.core.qdq import is_dequantize
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.pipeline import Invariant, Note, PassResult, graph_pass


def _check(gm: GraphModule) -> str | None:
    shared = [n.name for n in gm.graph.nodes if is_dequantize(n) and len(n.users) > 1]
    return f"{', '.join(shared[:3])} shared" if shared else None


one_reader = Invariant("every dequantize has one reader", _check)


@graph_pass(needs=(), gives=(one_reader,))
def duplicate_dequantize(gm: GraphModule) -> PassResult:
    """Copy a dequantize for each of its readers, so that a partitioner can take any one alone.

    Before:  d = dequantize(q); y = relu(d); z = conv2d(d, w)
    After:   d = dequantize(q); y = relu(d); d_1 = dequantize(q); z = conv2d(d_1, w)
    """
    editor = Editor(gm)
    notes = []
    for node in list(gm.graph.nodes):
        if not is_dequantize(node) or len(node.users) < 2:
            continue
        readers = list(node.users)
        for reader in readers[1:]:
            copy = editor.call(
                node.target,
                *node.args,
                like=node,
                before=reader,
                val=node.meta.get("val"),
                **node.kwargs,
            )
            reader.replace_input_with(node, copy)
        notes.append(Note(node.name, f"copied for {len(readers)} readers"))
    return PassResult(changed=editor.finish(), notes=tuple(notes))
