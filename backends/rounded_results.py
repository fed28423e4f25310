"""Which results of a canonical graph rounding reaches; the others are float32 throughout."""

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from pt2e_quant.core.qdq import is_qdq
from pt2e_quant.graph.alias import nested_graphs, subgraph_of, writes

__all__ = ["rounded_results"]


def rounded_results(gm: GraphModule) -> tuple[bool, ...]:
    """Whether quantize or dequantize operators stand in front of each result, in flat order.

    Values of 16 bits count as rounded too, because runtimes compute them in float32. Values that
    are written in place are not followed: if one of them may be rounded, every result may be.
    Operators from elsewhere than ATen (kernels, foreign quantize operators) may round.
    """
    rounded: set[Node] = set()
    for node in gm.graph.nodes:
        if _rounds(node) or any(source in rounded for source in node.all_input_nodes):
            rounded.add(node)
    leaves = pytree.tree_leaves(gm.graph.output_node().args[0])
    if any(written for node in rounded for written in writes(node)):
        return (True,) * len(leaves)
    return tuple(isinstance(leaf, Node) and leaf in rounded for leaf in leaves)


def _rounds(node: Node) -> bool:
    value = node.meta.get("val")
    if isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize < 4:
        return True
    if node.op == "get_attr":
        body = subgraph_of(node)
        return body is not None and any(
            _rounds(inner) for graph in nested_graphs(body) for inner in graph.graph.nodes
        )
    if node.op != "call_function":
        return False
    namespace = getattr(node.target, "namespace", "aten")
    return is_qdq(node) or namespace not in ("aten", "higher_order", "prim", "prims")
