"""The bias of a linear whose weight alone is in integers, as an add of its own."""

from torch.fx import GraphModule

from pt2e_quant.backends.xnnpack.passes.kernel_forms import is_weight_only
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.ops import argument, aten
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass


@graph_pass(needs=(HAS_VALUES,), gives=())
def split_biases(gm: GraphModule) -> PassResult:
    """Add the bias behind each linear of float activations and an integer weight.

    ExecuTorch's serializer takes a bias there only where the activations are integers too.

    Before:  linear(x, dq(w_q), b)
    After:   linear(x, dq(w_q)) + b
    """
    editor = Editor(gm)
    notes = []
    for node in list(gm.graph.nodes):
        if not is_weight_only(node) or (bias := argument(node, "bias")) is None:
            continue
        x, weight = argument(node, "input"), argument(node, "weight")
        value = node.meta["val"]
        product = editor.call(aten.linear.default, x, weight, like=node, before=node, val=value)
        added = editor.call(aten.add.Tensor, product, bias, like=node, before=node, val=value)
        editor.replace(node, added)
        notes.append(Note(node.name, "its bias is added behind it"))
    return PassResult(editor.finish(), tuple(notes))
