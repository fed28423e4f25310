"""Names of a model's values, and the constants that lost theirs."""

from collections.abc import Mapping, Sequence

import onnx_ir as ir
from torch.fx import Graph


def keep_constants(graph: ir.Graph) -> None:
    """Give a graph the constants that its nodes read and it lost.

    Rules of onnxscript name a new constant by an input, and of two with one name (the limits of two
    clamps of a value) the graph keeps the last.
    """
    for node in graph.all_nodes():
        for value in node.inputs:
            if value is None or value.const_value is None or value.producer() is not None:
                continue
            if not value.is_initializer() and not value.is_graph_input():
                value.name = _unique(value.name or "constant", set(graph.initializers))
                graph.initializers.add(value)


def names_before(exported: Graph, named: Graph) -> dict[str, str]:
    """The names of nodes in a graph before it was exported, by their names afterwards.

    torch numbers the nodes of an operator anew. Of several that one node was made into, the last
    has its value.
    """
    last = {}
    for node in exported.nodes:
        sources = node.meta.get("from_node") if node.op == "call_function" else None
        while sources:
            if sources[-1].graph_id == id(named):
                last[sources[-1].name] = node.name
                break
            sources = sources[-1].from_node
    return {after: before for before, after in last.items()}


def name_values(model: ir.Model, names: Mapping[str, str]) -> None:
    """Give the values of a model, and the nodes that make them, other names.

    A value that has a name which another one gets has a number behind it afterwards.
    """
    graph = model.graph
    made = [value for node in graph for value in node.outputs]
    inner = [v for part in graph.subgraphs() for node in part for v in node.outputs]
    fixed = {value.name for value in (*graph.inputs, *inner)} | set(graph.initializers)
    wanted = {v: name for v in made if (name := names.get(v.name or "")) and name not in fixed}
    taken = {*fixed, *wanted.values()}
    for value in made:
        name = wanted.get(value)
        if name is None and value.name is not None:
            name = _unique(value.name, taken)
        node = value.producer()
        if node is not None and name != value.name:
            value.name = name
            node.name = f"node_{name}"


def name_inputs(graph: ir.Graph, names: Sequence[str]) -> None:
    """Give the last inputs these names, where no other value has the name."""
    taken = {v.name for node in graph for v in node.outputs} | set(graph.initializers)
    taken |= {value.name for value in graph.inputs}
    for value, name in zip(graph.inputs[len(graph.inputs) - len(names) :], names, strict=True):
        value.name = _unique(name, taken)


def name_outputs(graph: ir.Graph, names: Sequence[str]) -> None:
    """Give the outputs their names in the result, where no other value has the name."""
    taken = {v.name for node in graph for v in node.outputs} | set(graph.initializers)
    taken |= {value.name for value in graph.inputs}
    for output, name in zip(graph.outputs, names, strict=True):
        if output.name == name:
            continue
        output.name = _unique(name, taken)


def _unique(name: str, taken: set[str | None]) -> str:
    """The name, or with a number behind it the first that is not taken; it is now."""
    unique, count = name, 0
    while unique in taken:
        count += 1
        unique = f"{name}_{count}"
    taken.add(unique)
    return unique
