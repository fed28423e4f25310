"""The node of the exported program that a node comes from, as torchao's numeric debugger names it.

A runner of torchao's own tests imports `_origins` from here: the file and the name stay.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch.fx import GraphModule, Node

from pt2e_quant.graph.meta import origin_source

_UNLIFT = "ExportedProgram.module().unlift()"


@dataclass(frozen=True)
class NodeSourceDebugInfo:
    """A node of the exported program.

    Args:
        name: its name, which joins graphs, also of two exports of one model.
        graph_id: the id of its graph; 0 if that is not known, as in a loaded program.
    """

    name: str
    graph_id: int = field(compare=False)


def _origins(gm: GraphModule) -> Iterator[tuple[Node, NodeSourceDebugInfo]]:
    """The nodes that come from the exported program; torchao's published tests call this name."""
    for node in gm.graph.nodes:
        source = origin_source(node)
        if source is None or node.op in ("placeholder", "output"):
            continue
        if node.meta["from_node"][-1].pass_name != _UNLIFT:
            yield node, NodeSourceDebugInfo(name=source.name, graph_id=source.graph_id)
