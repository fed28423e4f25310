"""Values that share storage, and buffers that a graph writes: read from operator schemas."""

from collections.abc import Iterator
from functools import cache
from itertools import zip_longest

from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Graph, GraphModule, Node

from pt2e_quant.core.specs import EdgeOrNode
from pt2e_quant.graph.ops import (
    BATCH_NORM,
    Overload,
    Overloads,
    arguments,
    aten,
    is_call,
    is_getitem,
)


def aliased_argument(node: Node) -> Node | None:
    """The argument whose storage the node's result may share, by the schema.

    An element of a tuple shares storage only if the tuple is made of views (`split`).
    """
    if is_getitem(node):
        source = node.args[0]
        if isinstance(source, Node) and aliased_argument(source) is not None:
            return source
        return None
    if not isinstance(node.target, OpOverload):
        return None
    names = _aliased_names(node.target)
    if names:
        values = arguments(node)
        for name in names:
            value = values[name]
            if isinstance(value, Node):
                return value
    return None


@cache
def _aliased_names(target: OpOverload) -> tuple[str, ...]:
    """The arguments whose storage an operator's result may share."""
    returned: set[str] = set()
    for result in target._schema.returns:
        if result.alias_info is not None:
            # the sets of a list of tensors are not told: any aliased argument may be meant
            returned |= set(result.alias_info.before_set) or {"*"}
    return tuple(
        argument.name
        for argument in target._schema.arguments
        if (info := argument.alias_info) is not None
        and returned & (set(info.before_set) | set(info.after_set))
    )


def roots(graph: Graph) -> dict[Node, Node]:
    """Map each node to the value whose storage it may share, itself if its storage is its own.

    Operators that return a view only for some layouts (`reshape`, `contiguous`, `to`) count as
    views. An in-place operator's result has the root of the value it writes.
    """
    found: dict[Node, Node] = {}
    for node in graph.nodes:
        source = aliased_argument(node) if node.op == "call_function" else None
        found[node] = node if source is None else found[source]
    return found


def _updates_statistics(node: Node) -> bool:
    """True if a batch_norm or instance_norm writes its running statistics (no schema says so)."""
    if is_call(node, (aten.batch_norm.default, aten.native_batch_norm.default)):
        return bool(arguments(node)["training"])
    if is_call(node, (aten.cudnn_batch_norm.default,)):
        return bool(arguments(node)["training"])
    return is_call(node, (aten.instance_norm.default,)) and bool(arguments(node)["use_input_stats"])


_NORMS: Overloads = (*BATCH_NORM, aten.instance_norm.default)
_NORM_TARGETS = frozenset(m.target if isinstance(m, Overload) else m for m in _NORMS)


@cache
def _may_write(target: object) -> bool:
    """True if a target may write an argument; cached, because passes ask it of every node."""
    if isinstance(target, OpOverload):
        return target._schema.is_mutable or target in _NORM_TARGETS
    return isinstance(target, HigherOrderOperator)


def writes(node: Node) -> Iterator[Node]:
    """The argument nodes that a node writes in place."""
    if node.op != "call_function" or not _may_write(node.target):
        return
    if isinstance(node.target, HigherOrderOperator):
        yield from _region_writes(node)
        return
    if not isinstance(node.target, OpOverload):
        return
    schema = node.target._schema
    if schema.is_mutable:
        values = arguments(node)
        for argument in schema.arguments:
            info = argument.alias_info
            if info is None or not (info.is_write or not info.before_set):
                continue  # the sets of a list of tensors are not told
            value = values[argument.name]
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(item, Node):
                    yield item
    elif is_call(node, _NORMS) and _updates_statistics(node):
        values = arguments(node)
        for name in ("running_mean", "running_var"):
            if isinstance(values[name], Node):
                yield values[name]


def subgraph_of(node: Node) -> GraphModule | None:
    """The graph module that a `get_attr` node names, None if it names something else."""
    if node.op != "get_attr" or isinstance(node.meta.get("val"), Tensor):
        return None
    value: object = node.graph.owning_module
    for part in str(node.target).split("."):
        value = getattr(value, part, None)
    return value if isinstance(value, GraphModule) else None


def nested_graphs(gm: GraphModule) -> Iterator[GraphModule]:
    """A graph and the bodies of its regions and branches."""
    yield gm
    for node in gm.graph.nodes:
        body = subgraph_of(node)
        if body is not None:
            yield from nested_graphs(body)


def region_operands(node: Node, body: GraphModule) -> list[tuple[Node, Node | None]]:
    """The placeholders of one of a higher-order operator's bodies, and what is passed to each.

    Operands are the node arguments after the last body, flattened; bodies read them in order.
    None stands for a value made inside the operator (a scan's slice) or a literal.
    """
    flat: list[object] = []
    for argument in node.args:
        if isinstance(argument, Node) and subgraph_of(argument) is not None:
            flat.clear()
        elif isinstance(argument, (list, tuple)):
            flat.extend(argument)
        else:
            flat.append(argument)
    placeholders = [n for n in body.graph.nodes if n.op == "placeholder"]
    operands = [v if isinstance(v, Node) else None for v in flat]
    return list(zip_longest(placeholders, operands[: len(placeholders)]))


def _region_writes(node: Node) -> Iterator[Node]:
    for argument in node.args:
        body = subgraph_of(argument) if isinstance(argument, Node) else None
        if body is None:
            continue
        written = mutated_roots(body.graph)
        for inner, outer in region_operands(node, body):
            if inner in written and outer is not None:
                yield outer


def mutated_roots(graph: Graph) -> frozenset[Node]:
    """The values (inputs, buffers, fresh results) whose storage some node writes."""
    return frozenset(root for _, root in writers(graph))


def is_written(value: Node) -> bool:
    """True if some node writes the storage of a value, also through its views."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        for user in one.users:
            if one in writes(user):
                return True
            if aliased_argument(user) is one:
                waiting.append(user)
    return False


def writers(graph: Graph) -> list[tuple[Node, Node]]:
    """Pairs of a writing node and a value whose storage it writes."""
    pairs = [(node, value) for node in graph.nodes for value in writes(node)]
    if not pairs:
        return []  # most graphs, and finding the roots is the longer walk
    root = roots(graph)
    return [(node, root[value]) for node, value in pairs]


def state_writers(graph: Graph) -> frozenset[Node]:
    """The nodes that write a buffer, a constant or an input, also through views."""
    return frozenset(node for node, root in writers(graph) if root.op != "call_function")


def mutated_buffers(gm: GraphModule) -> tuple[str, ...]:
    """The dotted names of the buffers and constants that a run of the graph writes, sorted."""
    return tuple(sorted({str(n.target) for n in mutated_roots(gm.graph) if n.op == "get_attr"}))


def written_inputs(graph: Graph) -> tuple[int, ...]:
    """The positions of the inputs that a graph writes."""
    roots_written = set(mutated_roots(graph))
    given = [node for node in graph.nodes if node.op == "placeholder"]
    return tuple(index for index, node in enumerate(given) if node in roots_written)


class WrittenPlaces:
    """The places where q/dq would change what a graph with in-place writes computes.

    With q/dq a reader gets a copy of a value, taken where the quantize stands. A write by the
    reader would go into the copy, and a write between quantize and reader would be missed.

    Args:
        graph: with the writes in place.
    """

    def __init__(self, graph: Graph) -> None:
        self.owners: dict[Node, Node] = {}
        self.lost: set[EdgeOrNode] = set()
        written = mutated_roots(graph)
        if written:
            self.owners = {n: owner for n, owner in roots(graph).items() if owner in written}
            self._walk(graph)

    def _walk(self, graph: Graph) -> None:
        """Find the values and edges of inputs that are written after they are read."""
        given = {n: owner for n, owner in self.owners.items() if owner.op == "placeholder"}
        versions = dict.fromkeys(given.values(), 0)
        seen: dict[Node, int] = {}
        for node in graph.nodes:
            targets = {given[value] for value in writes(node) if value in given}
            for source in node.all_input_nodes:
                owner = given.get(source)
                if owner in targets or (owner and seen[source] != versions[owner]):
                    self.lost |= {source, (source, node)}
            for owner in targets:
                versions[owner] += 1
            if node in given:
                seen[node] = versions[given[node]]

    def why_not(self, place: EdgeOrNode) -> str | None:
        """Why a place takes no q/dq, None if it does.

        Written buffers are never quantized: they hold values of an earlier call.
        """
        source, reader = (place, None) if isinstance(place, Node) else place
        owner = self.owners.get(source)
        if place in self.lost:
            return "is an input that this graph writes"
        if owner is None or owner.op != "get_attr" or reader is None:
            return None
        is_written = owner is source or source in writes(reader)
        return "is a buffer that this graph writes" if is_written else None
