"""Bodies of control flow: which of their inputs are constants of the graph around them."""

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch._ops import HigherOrderOperator
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.provenance import PROVENANCE_KEY, provenance_of
from pt2e_quant.graph.alias import region_operands, subgraph_of
from pt2e_quant.graph.meta import constant_nodes, source_constant

BODY_KEY = "pt2e_quant.body"
"""The key of a body's `meta` that holds its name in the graph around it."""


@dataclass(frozen=True, slots=True)
class Body:
    """One body of a `cond`, `scan`, `while_loop` or `map` call.

    Attributes:
        name: the dotted name of the body in the outermost module.
        gm: the body.
        call: the call that runs it, in the graph around it.
        constants: the placeholders that always hold the same constant, and the `get_attr` node
            of that constant in the outermost graph (or in the body that holds it).
    """

    name: str
    gm: GraphModule
    call: Node
    constants: Mapping[Node, Node]


def _varying(call: Node) -> int:
    """Return the number of leading operands of a call that change between runs of its body."""
    target = call.target
    kind = target.__name__ if isinstance(target, HigherOrderOperator) else ""
    groups = {"while_loop": (2,), "scan": (1, 2), "map_impl": (1,), "associative_scan": (1,)}
    return sum(
        len(operand)
        for i in groups.get(str(kind), ())
        if isinstance(operand := call.args[i], (list, tuple))
    )


def _constants(call: Node, body: GraphModule, known: Mapping[Node, Node]) -> dict[Node, Node]:
    fixed = constant_nodes(call.graph)
    varying = _varying(call)
    found: dict[Node, Node] = {}
    for i, (inner, outer) in enumerate(region_operands(call, body)):
        if i < varying or outer is None:
            continue
        if outer in known:
            found[inner] = known[outer]
        elif outer in fixed and source_constant(outer) is outer:
            found[inner] = outer
    return found


def bodies(
    gm: GraphModule, *, prefix: str = "", known: Mapping[Node, Node] | None = None
) -> tuple[Body, ...]:
    """The bodies that a graph's calls run, with those inside them, outermost first."""
    found: list[Body] = []
    for call in gm.graph.nodes:
        if call.op != "call_function" or not isinstance(call.target, HigherOrderOperator):
            continue
        for operand in call.args:
            body = subgraph_of(operand) if isinstance(operand, Node) else None
            if body is None or not isinstance(operand, Node):
                continue
            name = f"{prefix}{operand.target}"
            constants = _constants(call, body, known or {})
            found.append(Body(name, body, call, constants))
            found += bodies(body, prefix=f"{name}.", known=constants)
    return tuple(found)


def direct_bodies(gm: GraphModule) -> tuple[Body, ...]:
    """The bodies that a graph's own calls run, each once."""
    own = {body.name: body for body in bodies(gm) if body.call.graph is gm.graph}
    return tuple(own.values())


@dataclass(frozen=True, slots=True)
class NamedGraph:
    """A graph, or a body of its control flow.

    Attributes:
        prefix: of its nodes' names in a report: "" of the outermost, else "true_graph_0/".
        gm: the graph.
        constants: the nodes whose value is fixed, with the inputs of a body that always are.
    """

    prefix: str
    gm: GraphModule
    constants: frozenset[Node]


def named_graphs(gm: GraphModule) -> tuple[NamedGraph, ...]:
    """A graph and the bodies in it, each once, outermost first."""
    found = {gm: NamedGraph("", gm, constant_nodes(gm.graph))}
    for body in bodies(gm):
        constants = constant_nodes(body.gm.graph).union(body.constants)
        found.setdefault(body.gm, NamedGraph(f"{body.name}/", body.gm, constants))
    return tuple(found.values())


def copy_graph(gm: GraphModule) -> GraphModule:
    """A graph module with a graph of its own, and bodies of its own, that shares the tensors."""
    with warnings.catch_warnings():
        # torch 2.13 deprecates a class that its own pytrees are copied with.
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
        made = GraphModule(gm, copy.deepcopy(gm.graph))
    made.meta = dict(gm.meta)
    copy_bodies(made)
    return made


def copy_with_records(gm: GraphModule) -> GraphModule:
    """As `copy_graph`, with records of tensors and notes of its own, which passes may change."""
    made, table = copy_graph(gm), provenance_of(gm)
    made.meta[PROVENANCE_KEY] = replace(table, tensors=[*table.tensors], notes=[*table.notes])
    return made


def copy_bodies(gm: GraphModule) -> None:
    """Give a graph bodies of its own: `ExportedProgram.module()` hands out the program's."""
    names = {str(n.target): body for n in gm.graph.nodes if (body := subgraph_of(n)) is not None}
    made = {body: copy_graph(body) for body in names.values()}
    for name, body in names.items():
        owner, _, leaf = name.rpartition(".")
        setattr(gm.get_submodule(owner), leaf, made[body])


def bfs_trace_with_node_process(
    model: ExportedProgram | GraphModule, node_op: Callable[[Node], None]
) -> None:
    """Call a function on every node but inputs and outputs, in control-flow bodies too."""
    gm = model.graph_module if isinstance(model, ExportedProgram) else model
    if not isinstance(gm, GraphModule):
        raise ConfigError(f"a captured program is needed, found {type(model).__name__}")
    for graph_module in (gm, *(body.gm for body in bodies(gm))):
        for node in graph_module.graph.nodes:
            if node.op not in ("output", "placeholder"):
                node_op(node)
