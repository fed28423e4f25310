"""Sizes that are dynamic: what the file plans them at, and what the delegate starts from."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import sympy
from executorch.backends.xnnpack.operators import node_visitor
from executorch.exir.passes.sym_shape_eval_pass import ConstraintBasedSymShapeEvalPass
from executorch.exir.tensor import TensorSpec
from torch import SymInt
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree
from torch.utils._sympy.functions import FloorDiv
from torch.utils._sympy.value_ranges import bound_sympy

from pt2e_quant.core.capture import Capture
from pt2e_quant.core.errors import ArtifactError, UnsupportedError
from pt2e_quant.core.input_info import InputKind
from pt2e_quant.core.max_sizes import limit_sizes, unbounded_dims
from pt2e_quant.core.size_expression import evaluate_size
from pt2e_quant.flow.reexport import first_reader

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


class PlanForDeclared(ConstraintBasedSymShapeEvalPass):  # type: ignore[misc]  # no types
    """Plan each tensor for the ranges that the program declares.

    While ExecuTorch traces, also as late as where it writes the program, torch's convolution asks
    whether the batch is below 16 to choose a kernel of its own, and the answer for the example
    narrows the symbol: tensors are then planned for 15.

    Args:
        ranges: of the program.
    """

    def __init__(self, ranges: Ranges) -> None:
        super().__init__()
        self.ranges = dict(ranges)

    def call(self, graph_module: GraphModule) -> Any:
        """Put the declared ranges back, then take the largest size of each tensor."""
        for module in graph_module.modules():
            for node in module.graph.nodes if isinstance(module, GraphModule) else ():
                for spec in pytree.tree_leaves(node.meta.get("spec")):
                    if isinstance(spec, TensorSpec):
                        spec.shape = [self._declared(size) for size in spec.shape]
                        spec.stride = tuple(self._declared(step) for step in spec.stride)
        return super().call(graph_module)

    def _declared(self, size: int | SymInt) -> int | SymInt:
        """A size over the declared ranges, its quotients written out where they are whole.

        The bounds of s * s // s are those of its parts, which do not know of each other.
        """
        if isinstance(size, int):
            return size
        env = size.node.shape_env
        env.var_to_range.update(self.ranges)
        whole = size.node.expr.replace(FloorDiv, _quotient)
        found = bound_sympy(whole, env.var_to_range).upper
        return int(found) if isinstance(found, sympy.Integer) else size


def _quotient(base: sympy.Expr, divisor: sympy.Expr) -> sympy.Expr:
    exact = sympy.cancel(base / divisor)
    return exact if exact.is_integer else FloorDiv(base, divisor)


_LEAST_OFFER = 64
"""The bound that an error offers where the example is no larger."""


def refuse_unbounded(gm: GraphModule, capture: Capture) -> None:
    """Stop at a dimension without an upper bound: the file would take the example's size alone.

    Raises:
        UnsupportedError: naming the first, with the bounds to give.
    """
    free = unbounded_dims(capture)
    if not free:
        return
    path, dims = next(iter(free.items()))
    symbols = {symbol for found in free.values() for symbol in found.values()}
    offer = {symbol: max(_LEAST_OFFER, capture.dims[symbol].hint) for symbol in sorted(symbols)}
    shapes = limit_sizes(capture, offer).dynamic_shapes()
    sizes = {at: {dim: offer[s] for dim, s in found.items()} for at, found in free.items()}
    names = {i.path: i.name for i in capture.inputs}
    raise UnsupportedError(
        f'a .pte plans its memory beforehand, and dimension {min(dims)} of input "{path}" has no '
        "largest size",
        node=first_reader(gm, names[path]),
        fix=f"give the sizes to plan for: max_sizes={sizes}, or dynamic_shapes={shapes}",
    )


def check_planned(gm: GraphModule, capture: Capture, planned: Sequence[Sequence[int]]) -> None:
    """Hold the sizes that a file is planned for against those that the program declares.

    Args:
        gm: the canonical graph, to name the line.
        capture: the call.
        planned: the sizes of each tensor that the file takes, in order.

    Raises:
        ArtifactError: an input is planned smaller.
    """
    largest = {s: limits.maximum for s, limits in capture.dims.items() if limits.maximum}
    inputs = [i for i in capture.inputs if i.kind is InputKind.TENSOR]
    for info, sizes in zip(inputs, planned, strict=False):
        wanted = [s if isinstance(s, int) else evaluate_size(s, largest) for s in info.shape]
        for dim, (most, found) in enumerate(zip(wanted, sizes, strict=True)):
            if most is not None and found < most:
                raise ArtifactError(
                    f'the .pte takes dimension {dim} of input "{info.path}" up to {found}, the '
                    f"program up to {most}: ExecuTorch planned its memory for less",
                    node=first_reader(gm, info.name),
                    fix=f"max_sizes={{'{info.path}': {{{dim}: {found}}}}}",
                )
