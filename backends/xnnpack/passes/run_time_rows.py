"""Activations quantized at run time on one scale: the delegate gives each row its own."""

from torch.fx import GraphModule, Node

from pt2e_quant.core.qdq import (
    CHOOSE_QPARAMS_OPS,
    ChoosePerToken,
    DequantizePerToken,
    QdqKind,
    QuantizePerToken,
    is_quantize,
    kind_of_qdq,
)
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.ops import LINEAR, is_call
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass


def has_per_tensor(gm: GraphModule) -> bool:
    """Whether some linear reads activations quantized per tensor at run time."""
    return any(_feeds_linears(node) for node in gm.graph.nodes)


def _feeds_linears(node: Node) -> bool:
    if not is_quantize(node) or kind_of_qdq(node) is not QdqKind.PER_TENSOR_DYNAMIC:
        return False
    return all(is_call(reader, LINEAR) for dq in node.users for reader in dq.users)


@graph_pass(needs=(HAS_VALUES,), gives=())
def choose_per_row(gm: GraphModule) -> PassResult:
    """Find the qparams of each row, as XNNPACK does for linears whatever the graph says.

    What other quantizers annotate per tensor runs per row, which is nearer to float; here the
    graph is made to say what runs, so that the artifact can be held against it.

    Before:  q(x, *choose_qparams(x, -128, 127, eps, int8))
    After:   quantize_per_token(x, *choose_qparams_per_token_asymmetric(x, int8), …)
    """
    editor = Editor(gm)
    notes = []
    for node in [n for n in gm.graph.nodes if _feeds_linears(n)]:
        scale, zero_point, low, high, dtype = node.args[1:6]
        picks = [scale, zero_point]
        chosen = scale.args[0] if isinstance(scale, Node) and scale.args else None
        if not isinstance(chosen, Node) or chosen.target not in CHOOSE_QPARAMS_OPS:
            continue
        x = node.args[0]
        both = editor.call(ChoosePerToken, x, dtype, like=node, before=node)
        rows = [
            editor.call(pick.target, both, pick.args[1], like=node, before=node) for pick in picks
        ]
        made = editor.call(QuantizePerToken, x, *rows, low, high, dtype, like=node, before=node)
        for dequantize in list(node.users):
            value = dequantize.meta["val"]
            back = editor.call(
                DequantizePerToken,
                made,
                *rows,
                low,
                high,
                dtype,
                value.dtype,
                like=dequantize,
                before=dequantize,
                val=value,
            )
            editor.replace(dequantize, back)
        editor.discard([*node.users, node, *(p for p in picks if isinstance(p, Node)), chosen])
        notes.append(Note(node.name, "the delegate finds the qparams of each row"))
    return PassResult(editor.finish(), tuple(notes))
