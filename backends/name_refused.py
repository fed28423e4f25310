"""The node behind an error that a foreign tool raises, and an error that names it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.backends.cut_graph import cut_behind, operators
from pt2e_quant.core.errors import ArtifactError, Pt2eQuantError, UnsupportedError
from pt2e_quant.core.qdq import is_dequantize, is_quantize
from pt2e_quant.graph.ops import is_getitem

TryPart: TypeAlias = Callable[[GraphModule], object]
"""Lowers a graph and loads the file; raises where either fails."""

_FIX = (
    "write it with other operators, compute it outside of the model, or leave it float "
    "(quantizer.set_module_name(name, None)) where its q/dq are what is refused"
)


@contextmanager
def named_refusals(gm: GraphModule, try_part: TryPart) -> Iterator[None]:
    """Turn what ExecuTorch raises in the block, and errors without a node, into one with a node.

    The node is the last one of the smallest part of the graph that is refused too. A handful of
    parts are lowered to find it.

    Raises:
        UnsupportedError: in place of any error that is not of this package.
    """
    try:
        yield
    except UnsupportedError as error:
        if error.node_name:
            raise
        node = first_refused(gm, try_part)
        raise UnsupportedError(error.what, node=node, fix=error.fix) from error
    except Pt2eQuantError:
        raise
    except Exception as error:  # ExecuTorch raises RuntimeError, ValueError, AssertionError, …
        raise UnsupportedError(
            f"ExecuTorch cannot take this graph: {_first_line(error)}",
            node=first_refused(gm, try_part),
            fix=_FIX,
        ) from error


@contextmanager
def named_node(gm: GraphModule, try_part: TryPart) -> Iterator[None]:
    """Add the first operator that is refused to errors of the block that name none.

    Where each part of the graph is taken alone, its output is named.

    Raises:
        UnsupportedError, ArtifactError: as the block raised it, with a node and a fix.
    """
    try:
        yield
    except (UnsupportedError, ArtifactError) as error:
        if error.node_name:
            raise
        node = first_refused(gm, try_part) or gm.graph.output_node()
        raise type(error)(error.what, node=node, fix=error.fix or _FIX) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def first_refused(gm: GraphModule, try_part: TryPart) -> Node | None:
    """The first operator behind which the graph is refused; None if no part of it is."""
    found = [(node, _value(node)) for node in operators(gm)]
    nodes = [(node, value) for node, value in found if value is not None]
    low, high = 0, len(nodes)
    while low < high:
        middle = (low + high) // 2
        if _is_refused(gm, nodes[middle][1], try_part):
            high = middle
        else:
            low = middle + 1
    return nodes[low][0] if low < len(nodes) else None


def _value(node: Node) -> Node | None:
    """A tensor that an operator gives: itself, or the first of several that is read.

    Where one quantize alone reads it, it is what the quantize is read as: without one the operator
    would be in float.
    """
    values = (node, *(user for user in node.users if is_getitem(user)))
    value = next((v for v in values if isinstance(v.meta.get("val"), Tensor)), None)
    stored = [user for user in value.users if is_quantize(user)] if value is not None else []
    if value is None or len(stored) < len(value.users) or len(stored) != 1:
        return value
    return next((user for user in stored[0].users if is_dequantize(user)), value)


def _is_refused(gm: GraphModule, node: Node, try_part: TryPart) -> bool:
    try:
        try_part(cut_behind(gm, node.name))
    except Exception:  # Whatever stops it: the whole was stopped, and that is the error.
        return True
    return False
