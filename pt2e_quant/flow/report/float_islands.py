"""Float operators of a quantized graph as entries of an audit, with the bytes at their borders."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import SymInt, Tensor
from torch.fx import Node

from pt2e_quant.core.errors import module_path, source_line
from pt2e_quant.core.provenance import FloatOperator
from pt2e_quant.core.qdq import is_dequantize, is_quantize
from pt2e_quant.graph.op_table import operator_name
from pt2e_quant.graph.ops import is_getitem
from pt2e_quant.passes.reference.forms.registry import MOVES, form_of


def float_islands(
    floats: Iterable[Node], why: Callable[[Node], tuple[str, str]], prefix: str
) -> Iterator[FloatOperator]:
    """The float operators of a graph, without data movement outside of the quantized part.

    Args:
        floats: its float operators, in graph order.
        why: the reason of one, and its remedy.
        prefix: of its nodes' names.
    """
    places = {node: place for place, node in enumerate(floats)}
    for group in _groups(places):
        if all(form_of(node) in MOVES for node in group) and _is_at_an_end(group):
            continue
        for node in sorted(group, key=places.__getitem__):
            if is_getitem(node) and node.all_input_nodes[0] in places:
                continue  # a part of what its operator gives
            reason, remedy = why(node)
            yield FloatOperator(
                node=prefix + node.name,
                operator=operator_name(node),
                module=module_path(node),
                source=source_line(node),
                bytes_across=sum(_bytes(n) for n in _borders(node)),
                reason=reason,
                remedy=remedy,
            )


def _groups(floats: Iterable[Node]) -> list[list[Node]]:
    """Float operators that read each other."""
    group_of: dict[Node, list[Node]] = {}
    for node in floats:
        group = [node]
        for source in node.all_input_nodes:
            other = group_of.get(source)
            if other is not None and other is not group:
                group = other + [n for n in group if n not in other]
        for member in group:
            group_of[member] = group
    return list({id(group): group for group in group_of.values()}.values())


def _is_at_an_end(group: list[Node]) -> bool:
    """True if values only enter or only leave the program through a group."""
    reads = any(is_dequantize(source) for n in group for source in n.all_input_nodes)
    feeds = any(is_quantize(user) for n in group for user in n.users)
    return not (reads and feeds)


def _borders(node: Node) -> list[Node]:
    """The float tensors by which a node is bound to integers."""
    sources = [n for n in node.all_input_nodes if is_dequantize(n)]
    results = [node, *(user for user in node.users if is_getitem(user))]
    return [*sources, *(n for n in results if any(is_quantize(user) for user in n.users))]


def _bytes(node: Node) -> int:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return 0
    return math.prod(_size(s) for s in value.shape) * value.element_size()


def _size(size: Any) -> int:
    """A size, at the captured sample where it is dynamic."""
    return int(size.node.hint or 1) if isinstance(size, SymInt) else int(size)
