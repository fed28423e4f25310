"""Embedding tables that a linear computes with too: the head of a language model."""

from collections.abc import Iterator

from torch import Tensor
from torch.fx import Node

from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.ops import EMBEDDING, LINEAR, Overload, argument, is_call


def is_embedding(node: Node) -> bool:
    """True if a node looks rows up."""
    return is_call(node, EMBEDDING)


def is_untied_embedding(node: Node) -> bool:
    """True if this is an embedding whose table nothing but embeddings reads, under any name."""
    if not is_embedding(node):
        return False
    table = _storage(argument(node, "weight"))
    return table is not None and all(is_embedding(user) for user in _readers(node, table))


def is_tied_embedding(node: Node) -> bool:
    """True if this is an embedding whose table a linear computes with too."""
    if not is_embedding(node):
        return False
    table = _storage(argument(node, "weight"))
    return table is not None and any(is_call(user, LINEAR) for user in _readers(node, table))


def is_tied_linear(node: Node) -> bool:
    """True if this is a linear whose weight is an embedding table."""
    if not is_call(node, LINEAR):
        return False
    weight = argument(node, "weight")
    table = _storage(weight) if isinstance(weight, Node) else None
    # Asked of every linear: a graph has few embeddings, but many constants.
    return table is not None and any(
        _storage(argument(found, "weight")) == table for found in _embeddings(node)
    )


def _embeddings(node: Node) -> Iterator[Node]:
    for member in EMBEDDING:
        target = member.target if isinstance(member, Overload) else member
        for found in node.graph.find_nodes(op="call_function", target=target):
            if is_embedding(found):
                yield found


def _readers(node: Node, table: int) -> Iterator[Node]:
    for other in node.graph.find_nodes(op="get_attr"):
        if _storage(other) == table:
            yield from other.users


def _storage(node: Node) -> int | None:
    gm = node.graph.owning_module
    value = constant_of(gm, node) if gm is not None and node.op == "get_attr" else None
    return value.untyped_storage().data_ptr() if isinstance(value, Tensor) else None
