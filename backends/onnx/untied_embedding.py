"""Whether an embedding looks rows up in a table of its own."""

from collections.abc import Iterator

from torch import Tensor
from torch.fx import Node

from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.ops import EMBEDDING, argument, is_call

__all__ = ["is_untied_embedding"]


def is_untied_embedding(node: Node) -> bool:
    """Whether this is an embedding whose table nothing but embeddings reads, under any name."""
    if not is_call(node, EMBEDDING):
        return False
    table = _storage(argument(node, "weight"))
    return table is not None and all(is_call(user, EMBEDDING) for user in _readers(node, table))


def _readers(node: Node, table: int) -> Iterator[Node]:
    for other in node.graph.find_nodes(op="get_attr"):
        if _storage(other) == table:
            yield from other.users


def _storage(node: Node) -> int | None:
    gm = node.graph.owning_module
    value = constant_of(gm, node) if gm is not None and node.op == "get_attr" else None
    return value.untyped_storage().data_ptr() if isinstance(value, Tensor) else None
