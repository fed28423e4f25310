"""Store packed constants as one integer per element again, as foreign tools read them."""

from collections import Counter
from collections.abc import Sequence

from torch.fx import GraphModule, Node

from pt2e_quant.core.errors import InvariantError
from pt2e_quant.core.qdq import FLOAT_NAME_KEY, float_name
from pt2e_quant.core.unpack_op import is_unpack
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.pipeline import Invariant, Note, PassResult, graph_pass
from pt2e_quant.passes.weights.pack_weights import PACKED_SUFFIX


def _check(gm: GraphModule) -> str | None:
    left = [n.name for n in gm.graph.nodes if is_unpack(n)]
    return f"{', '.join(left[:3])} left" if left else None


nothing_packed = Invariant("no constant is packed", _check)


@graph_pass(needs=(), gives=(nothing_packed,))
def unpack_weights(gm: GraphModule) -> PassResult:
    """Unpack each packed constant, one at a time, under the name it had before it was packed.

    A lowering begins with it: an operator that a partitioner does not know in front of a
    dequantize keeps it from taking the operator behind. The packed tensor is not written, and
    leaves the module's tables as soon as nothing reads it.

    Before:  dequantize(unpack(weight_q_packed, 4, True, …), …)
    After:   dequantize(weight_q, …)
    """
    return unpack_nodes(gm, [n for n in gm.graph.nodes if is_unpack(n)])


def unpack_nodes(gm: GraphModule, nodes: Sequence[Node]) -> PassResult:
    """`unpack_weights` for some of the nodes that unpack."""
    editor = Editor(gm)
    reads = Counter(str(n.target) for n in gm.graph.nodes if n.op == "get_attr")
    notes = []
    for node in nodes:
        packed = node.args[0]
        value = constant_of(gm, node)
        if value is None or not isinstance(packed, Node):
            raise InvariantError(
                "this unpack reads something that is no constant",
                node=node,
                fix="give the result of convert_pt2e, before any other edit",
            )
        name = str(packed.target).removesuffix(PACKED_SUFFIX)
        if len(packed.users) == 1 and reads[str(packed.target)] == 1:
            owner, _, leaf = str(packed.target).rpartition(".")
            delattr(gm.get_submodule(owner), leaf)
        made = editor.constant(name, value, like=node)
        made.meta[FLOAT_NAME_KEY] = float_name(packed)
        editor.replace(node, made)
        notes.append(Note(node.name, f"{name}: {value.dtype}{list(value.shape)}"))
    return PassResult(editor.finish(), tuple(notes))
