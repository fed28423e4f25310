"""Sizes that are dynamic: what the file plans them at, and what the delegate starts from."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from executorch.backends.xnnpack.operators import node_visitor
from torch import SymInt, Tensor
from torch.export import ExportedProgram
from torch.fx import Node

__all__ = ["plan_for_declared", "start_small"]

Ranges = Mapping[Any, Any]
"""Of `ExportedProgram.range_constraints`: sympy symbols and their value ranges."""


@contextmanager
def start_small(ranges: Ranges) -> Iterator[None]:
    """Write delegates that start from the least size of each dynamic dimension.

    XNNPACK plans the memory of a delegate at its first call and again where a tensor outgrows the
    size it was planned at. ExecuTorch writes each tensor's largest size, so no tensor ever outgrows
    it; but the scratch memory of an operator (an integer mean has some), the run-time scales of
    rows, and which results share memory with an operand are planned for the first call alone, and
    a larger second call writes over other tensors. Planned from the least size, each larger
    call plans again.
    """
    largest = node_visitor.get_shape
    least = {symbol: _lower(limits) for symbol, limits in ranges.items()}
    node_visitor.get_shape = lambda node: _least_shape(node, least)
    try:
        yield
    finally:
        node_visitor.get_shape = largest


def _least_shape(node: Node, least: Mapping[Any, int]) -> list[int]:
    sizes = node.meta["val"].shape
    return [s if isinstance(s, int) else max(int(s.node.expr.xreplace(least)), 1) for s in sizes]


def _lower(limits: Any) -> int:
    # torch traces dynamic sizes from 2; its programs take 1 as well.
    return int(limits.lower) if limits.lower > 2 else 1


def plan_for_declared(program: ExportedProgram) -> None:
    """Give symbols the ranges again that the program declares.

    While ExecuTorch traces, torch's convolution asks whether the batch is below 16 to choose a
    kernel of its own, and the answer for the example narrows the symbol: the tensors of later
    operators are then planned for 15.
    """
    values = [node.meta.get("val") for node in program.graph.nodes]
    sizes = [size for value in values if isinstance(value, Tensor) for size in value.shape]
    for size in sizes:
        if isinstance(size, SymInt):
            size.node.shape_env.var_to_range.update(program.range_constraints)
