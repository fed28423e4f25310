"""Write complex numbers as pairs of real ones, for a runtime whose operators know none."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from pt2e_quant.accelerate.recompile import recompile
from pt2e_quant.graph.alias import mutated_roots
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import attribute
from pt2e_quant.graph.ops import is_getitem
from pt2e_quant.graph.pipeline import HAS_VALUES, GraphPass, Note, PassResult
from pt2e_quant.graph.subgraphs import named_graphs
from pt2e_quant.passes.functions.complex_numbers import FUNCTIONS, MOVES, Complex, of_parts
from pt2e_quant.passes.functions.write_functions import trace_before

_FACTORIES = ("full", "new_zeros", "ones", "zeros", "zeros_like")


def write_complex(has_kernel: Callable[[Node], bool]) -> GraphPass:
    """A pass over a graph and its bodies.

    Calls that pass complex numbers to each other are written together, or all left: those that
    the runtime has kernels for, those that take or give complex numbers across the border of the
    graph, and those with an operator that is not among `complex_numbers.FUNCTIONS`.

    Before:  z: complex64 = view_as_complex(x); view_as_real(mul(z, w))
    After:   re, im = unbind(x, -1); stack([re * w_real - im * w_imag, re * w_imag + im * w_real])

    Args:
        has_kernel: whether the runtime computes a call that reads or gives complex numbers.
    """
    return GraphPass(
        "write_complex", partial(_edit, has_kernel=has_kernel), needs=(HAS_VALUES,), gives=()
    )


def _edit(gm: GraphModule, has_kernel: Callable[[Node], bool]) -> PassResult:
    notes: list[Note] = []
    for body in named_graphs(gm):
        written = mutated_roots(body.gm.graph)
        for members in _islands(body.gm.graph):
            if all(map(has_kernel, members)) or not all(map(_is_known, members)):
                continue
            if not written.isdisjoint(members):
                continue
            _write(body.gm, members)
            text = "complex numbers are computed as pairs of real ones"
            notes.append(Note(members[0].name, text))
        if notes:
            body.gm.graph.eliminate_dead_code()
            recompile(body.gm)
    return PassResult(bool(notes), tuple(notes))


def _is_complex(node: Node) -> bool:
    leaves = tree_leaves(node.meta.get("val"))
    return any(isinstance(leaf, Tensor) and leaf.is_complex() for leaf in leaves)


def _islands(graph: Graph) -> Iterator[list[Node]]:
    """Complex values and what reads them, connected by them, each in the order of the graph."""
    island: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        joined = [island[n] for n in node.all_input_nodes if n in island and _is_complex(n)]
        if not joined and not _is_complex(node):
            continue
        whole = joined[0] if joined else []
        for other in joined[1:]:
            if other is not whole:
                whole += other
                island.update(dict.fromkeys(other, whole))
        whole.append(node)
        island[node] = whole
    order = {node: place for place, node in enumerate(graph.nodes)}
    for members in {id(found): found for found in island.values()}.values():
        yield sorted(members, key=order.__getitem__)


def _is_known(node: Node) -> bool:
    """True if a call, or a constant, can be written as parts."""
    if node.op == "get_attr" or is_getitem(node):
        return True
    name = operator_of(node)
    if name in MOVES:
        # A real tensor among complex ones has no parts.
        return all(_is_complex(n) or not _is_float(n) for n in node.all_input_nodes)
    return name in FUNCTIONS or name in _FACTORIES


def _is_float(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()


def operator_of(node: Node) -> str:
    """The name of the ATen operator that a node calls, without its overload; else empty."""
    target = node.target
    return target._schema.name.removeprefix("aten::") if isinstance(target, OpOverload) else ""


def _write(gm: GraphModule, members: list[Node]) -> None:
    editor = Editor(gm)
    pairs: dict[Node, Any] = {}
    for node in members:
        if node.op == "get_attr":
            value = attribute(gm, str(node.target)).detach()
            names = (f"{node.target}_real", f"{node.target}_imag")
            parts = (value.real.contiguous(), value.imag.contiguous())
            pairs[node] = Complex(map(partial(editor.constant, like=node), names, parts))
        elif is_getitem(node):
            pairs[node] = pairs[node.args[0]][node.args[1]]  # type: ignore[index]
        elif operator_of(node) in _FACTORIES:
            pairs[node] = _made(editor, node, pairs)
        else:
            found = _traced(gm, node, pairs)
            if found is None:
                return  # What was written computes the same as what is left.
            if isinstance(found, Node):
                node.replace_all_uses_with(found)
            else:
                pairs[node] = found


def _made(editor: Editor, node: Node, pairs: dict[Node, Any]) -> Complex:
    """New tensors, of whose numbers all are real."""
    dtype = node.meta["val"].real.dtype
    args: Any = map_arg(node.args, lambda n: pairs[n][0] if n in pairs else n)
    kwargs = {**node.kwargs, "dtype": dtype}
    re = editor.call(node.target, *args, like=node, before=node, **kwargs)
    zeros = torch.ops.aten.zeros_like.default
    return Complex((re, editor.call(zeros, re, like=node, before=node)))


def _traced(gm: GraphModule, node: Node, pairs: dict[Node, Any]) -> Any:
    """The parts of a call's results, or its real result; None if it cannot be written."""
    name = operator_of(node)
    function = of_parts(node.target) if name in MOVES else FUNCTIONS[name]
    read = (p for n in node.all_input_nodes for p in (pairs[n] if n in pairs else (n,)))
    inputs = list(dict.fromkeys(read))
    results: list[Any] = []

    def call(*values: Any) -> list[Tensor]:
        held = dict(zip(inputs, values, strict=True))

        def given(n: Node) -> Any:
            return Complex(held[p] for p in pairs[n]) if n in pairs else held[n]

        args: Any = map_arg(node.args, given)
        kwargs: Any = map_arg(node.kwargs, given)
        found = function(*args, **kwargs)
        results[:] = found if isinstance(found, list) else [found]
        return [part for one in results for part in (one if isinstance(one, Complex) else [one])]

    nodes = trace_before(gm, node, call, inputs, is_canonical=True)
    if nodes is None:
        return None
    if isinstance(results[0], Tensor):
        return nodes[0]
    both = [Complex(nodes[i : i + 2]) for i in range(0, len(nodes), 2)]
    return both if isinstance(node.meta["val"], (list, tuple)) else both[0]
