"""Cut a canonical graph so that it ends at one of its own values."""

import copy
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from pt2e_quant.core.qdq import is_dequantize, is_qdq, is_quantize
from pt2e_quant.core.read_capture import CAPTURE_KEY, capture_of
from pt2e_quant.graph.alias import aliased_argument, mutated_buffers, mutated_roots
from pt2e_quant.graph.ops import is_getitem


def operators(gm: GraphModule) -> tuple[Node, ...]:
    """The nodes that compute on the call's inputs and on written buffers, in graph order.

    Without q/dq, choices of their scales, views, elements of tuples, and constants.
    """
    varying = _varying(gm)
    return tuple(
        node
        for node in gm.graph.nodes
        if node in varying
        and not is_qdq(node)
        and not is_getitem(node)
        and not _chooses_scales(node)
        and aliased_argument(node) is None
    )


def _chooses_scales(node: Node) -> bool:
    """True if the results of a call are scales and zero points."""
    used = [node, *(user for user in node.users if is_getitem(user))]
    readers = [(value, reader) for value in used for reader in value.users if reader not in used]
    return all(is_qdq(reader) and reader.args[0] is not value for value, reader in readers)


def _varying(gm: GraphModule) -> set[Node]:
    """The calls whose results depend on the inputs or on buffers that are written."""
    varies = {*mutated_roots(gm.graph), *(n for n in gm.graph.nodes if n.op == "placeholder")}
    calls = set()
    for node in gm.graph.nodes:
        if node.op == "call_function" and not varies.isdisjoint(node.all_input_nodes):
            varies.add(node)
            calls.add(node)
    return calls


def values_to_compare(gm: GraphModule) -> tuple[Node, ...]:
    """The values at which a canonical graph can be cut and still be lowered alike, in order.

    Those behind a quantize with constant scales, and results that no quantize reads. What a lone
    chain of operators hands to a quantize is not among them: a runtime has it as integers, if at
    all. Nor are views, constants and the scales that are chosen at run time.
    """
    varying = _varying(gm)
    inside: set[Node] = set()
    for node in reversed(gm.graph.nodes):
        readers = list(node.users)
        if readers and all(is_qdq(reader) for reader in readers) and not is_quantize(node):
            inside.add(node)
        elif len(readers) == 1 and readers[0] in inside and _is_unary(readers[0], varying):
            inside.add(node)
    return tuple(
        node
        for node in gm.graph.nodes
        if node in varying
        and _is_float(node)
        and (_is_static(node) if is_dequantize(node) else _is_result(node) and node not in inside)
    )


def _is_unary(node: Node, varying: set[Node]) -> bool:
    return sum(source in varying for source in node.all_input_nodes) == 1


def _is_float(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point() and not is_quantize(node)


def _is_static(dequantize: Node) -> bool:
    """True if it reads a quantize whose scale and zero point are constants."""
    quantize = dequantize.args[0]
    if not isinstance(quantize, Node) or not is_quantize(quantize):
        return False
    return all(source.op == "get_attr" for source in quantize.all_input_nodes[1:])


def _is_result(node: Node) -> bool:
    return bool(node.users) and aliased_argument(node) is None


def cut_behind(gm: GraphModule, name: str) -> GraphModule:
    """A graph that returns one value of another, as a tuple of one; the other is not changed.

    Its inputs are the same, read or not. What the graph wrote into buffers before the value is
    written still; constants and buffers are shared.

    Args:
        gm: a canonical graph.
        name: of a node whose value is a tensor.
    """
    graph = _copied(gm)
    value = next(node for node in graph.nodes if node.name == name)
    output = graph.output_node()
    output.args = ((value,),)
    for node in reversed(graph.nodes):
        if node is value:
            break
        if node.op not in ("output", "placeholder"):
            graph.erase_node(node)
    graph.eliminate_dead_code()
    return _returning(gm, graph, 1)


def with_values(gm: GraphModule, names: Sequence[str]) -> tuple[GraphModule, list[int]]:
    """A graph that returns values of its own behind its results, as one flat tuple.

    The given graph is not changed; constants and buffers are shared. Results that are no values of
    nodes (None, numbers) are left out.

    Args:
        gm: a canonical graph.
        names: of nodes whose values are tensors.

    Returns:
        The graph, and the place of each named value among what it returns.
    """
    graph = _copied(gm)
    by_name = {node.name: node for node in graph.nodes}
    output = graph.output_node()
    returned = list(output.all_input_nodes)
    places = []
    for name in names:
        node = by_name[name]
        if node not in returned:
            if is_dequantize(node):  # its reader has it to itself
                with graph.inserting_before(output):
                    node = graph.node_copy(node, lambda n: n)
            returned.append(node)
        places.append(returned.index(node))
    output.args = (tuple(returned),)
    return _returning(gm, graph, len(returned)), places


def _copied(gm: GraphModule) -> Graph:
    with warnings.catch_warnings():
        # torch 2.13 deprecates a class that its own pytrees are copied with.
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
        return copy.deepcopy(gm.graph)


def _returning(gm: GraphModule, graph: Graph, count: int) -> GraphModule:
    """A module of an edited copy of a graph, which returns a flat tuple."""
    out_spec = pytree.tree_structure((0,) * count)
    codegen: Any = graph._codegen
    if getattr(codegen, "pytree_info", None) is not None:
        codegen.pytree_info = codegen.pytree_info._replace(out_spec=out_spec)
    made = GraphModule(gm, graph)
    made.meta = dict(gm.meta)
    written = {*mutated_buffers(made)}
    capture = capture_of(gm)
    kept = tuple(buffer for buffer in capture.mutated_buffers if buffer in written)
    made.meta[CAPTURE_KEY] = replace(capture, out_spec=out_spec, mutated_buffers=kept)
    return made
