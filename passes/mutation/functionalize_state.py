"""Write each buffer and input that a graph writes once, as a whole, at its end."""

from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from pt2e_quant.graph.alias import mutated_roots, roots, writes
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import attribute
from pt2e_quant.graph.ops import aten, is_call
from pt2e_quant.graph.pipeline import Note, PassResult, graph_pass
from pt2e_quant.passes.mutation.functionalize_activations import functionalize_activations


@graph_pass(needs=(), gives=())
def functionalize_state(gm: GraphModule) -> PassResult:
    """Give a graph that writes buffers or inputs new values in place of the writes.

    A write through a view reaches its buffer by shared storage alone. A later pass that writes a
    view as another operator cuts that link. Behind this pass the graph has no such writes: each
    buffer and input is written by one copy at the end.

    Before:  row = select(h, 0, -1); copy_(row, x); y = sum(h, [0])
    After:   n = select_scatter(clone(h), x, 0, -1); y = sum(n, [0]); copy_(h, n)
    """
    end = gm.graph.output_node()
    if not _is_written_elsewhere(gm.graph, _copies_at(end)):
        return PassResult(changed=False)
    editor = Editor(gm)
    notes = []
    for readers in _readers_of_state(gm):
        first = readers[0]
        held = editor.call(aten.clone.default, first, like=first, after=first)
        for reader in readers:
            editor.replace(reader, held, except_in=[held])
        editor.call(aten.copy_.default, first, held, like=first, before=end)
        notes.append(Note(first.name, "written once, at the end"))
    editor.finish()
    return PassResult(True, (*notes, *functionalize_activations(gm).notes))


def _copies_at(end: Node) -> set[Node]:
    """The copies into buffers and inputs that a graph ends with."""
    found = set()
    node = end.prev
    while is_call(node, (aten.copy_.default,)) and _is_state(node.args[0]):
        found.add(node)
        node = node.prev
    return found


def _is_state(node: object) -> bool:
    return isinstance(node, Node) and node.op in ("get_attr", "placeholder")


def _is_written_elsewhere(graph: Graph, copies: set[Node]) -> bool:
    """True if a node other than these copies writes a buffer or input."""
    if not any(_is_state(n) for n in mutated_roots(graph)):
        return False
    root = roots(graph)
    return any(
        _is_state(root[value])
        for node in graph.nodes
        if node not in copies
        for value in writes(node)
    )


def _readers_of_state(gm: GraphModule) -> list[list[Node]]:
    """For each written buffer or input the nodes that stand for it, under any of its names."""
    found: dict[object, list[Node]] = {}
    keys = {n: _identity(gm, n) for n in gm.graph.nodes if _is_state(n)}
    written = {keys[n] for n in mutated_roots(gm.graph) if n in keys}
    for node, key in keys.items():
        if key in written:
            found.setdefault(key, []).append(node)
    return list(found.values())


def _identity(gm: GraphModule, node: Node) -> object:
    """A key that is equal for two nodes that stand for one tensor."""
    held = attribute(gm, str(node.target)) if node.op == "get_attr" else None
    if not isinstance(held, Tensor):
        return node
    return held.data_ptr(), held.shape, held.stride(), held.dtype
