"""Cache writes: which q/dq of a graph are those of buffers that calls write."""

from torch.fx import GraphModule, Node

from pt2e_quant.core.cache_ops import PackRows, UnpackRows
from pt2e_quant.graph.alias import roots, writes


def cache_nodes(gm: GraphModule) -> set[Node]:
    """The q/dq of buffers that calls write, and what packs and unpacks their rows."""
    root = roots(gm.graph)
    written = {root[value].target for node in gm.graph.nodes for value in writes(node)}
    found = set()
    for node in gm.graph.nodes:
        read = node.args[0] if node.args else None
        source = root[read] if isinstance(read, Node) else None
        is_read = source is not None and (
            source.target is UnpackRows or (source.op == "get_attr" and source.target in written)
        )
        is_written = any(user.target is PackRows or any(writes(user)) for user in node.users)
        if node.target in (PackRows, UnpackRows) or is_read or is_written:
            found.add(node)
    return found
