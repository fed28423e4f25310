"""What `tune` chooses among: groups of a program that move together, and schemes for them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from pt2e_quant.analysis.graph_side import origin_name
from pt2e_quant.analysis.group_costs import GroupCost, Sensitivity
from pt2e_quant.analysis.solve import Candidate
from pt2e_quant.backends.target.recipe_file import FLOAT, NodeScheme
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.core.qdq import is_dequantize, is_qdq, is_quantize
from pt2e_quant.graph.ops import ADDMM, CONV, CONV_TRANSPOSE, LINEAR, MM, is_call

_PRODUCTS = (*LINEAR, *CONV, *CONV_TRANSPOSE, *ADDMM, *MM)
"""The linear operations: products with weights."""

_FLOAT_RANK = 4
"""How much worse than the last recipe of a menu float is, where recipes are given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Uniform:
    """A program quantized with one recipe throughout.

    Args:
        name: of the recipe.
        gm: the converted graph.
        costs: what each group costs alone.
    """

    name: str
    gm: GraphModule
    costs: Sensitivity

    @property
    def size(self) -> int:
        """Bytes of all constants."""
        return constants_size(self.gm)

    def sizes(self) -> dict[str, int]:
        """Bytes of each constant as stored, qparams included."""
        return {r.name: r.size_after + r.qparams for r in provenance_of(self.gm).sizes}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Groups that move together.

    Args:
        name: of the first one.
        groups: of the base recipe, in graph order.
        nodes: in the graph that the recipe annotates.
        candidates: the schemes that it can have, the base recipe's first, float last.
    """

    name: str
    groups: tuple[GroupCost, ...]
    nodes: tuple[str, ...]
    candidates: tuple[Candidate, ...]

    def rules(self, scheme: str, why: str) -> list[NodeScheme]:
        """Rules that give all its nodes a scheme."""
        return [NodeScheme(node=node, scheme=scheme, why=why) for node in self.nodes]


def clusters_of(base: Uniform, others: Sequence[Uniform]) -> tuple[Cluster, ...]:
    """The groups of a program that the base recipe quantizes, tied where they belong together.

    Linear operations that read one value (query, key and value of attention) are tied, for they
    share its quantized form; so are operators that share a weight.

    Args:
        base: quantized with the recipe that is varied.
        others: quantized with the other schemes of the menu.
    """
    anchors = _anchors(base.gm)
    tied = _tied(base.costs.groups, anchors)
    sizes = {uniform.name: uniform.sizes() for uniform in (base, *others)}
    floats = {r.name: r.size_before for r in provenance_of(base.gm).sizes}
    known = {u.name: {g.group: g for g in u.costs.groups} for u in (base, *others)}
    found = []
    for members in tied:
        candidates = []
        for rank, uniform in enumerate((base, *others)):
            costs = [known[uniform.name].get(group.group) for group in members]
            noise = [cost.cost for cost in costs if cost is not None]
            if len(noise) == len(members):
                size = _size(members, sizes[uniform.name], floats)
                candidates.append(_candidate(uniform.name, noise, rank * len(members), size))
        whole = _FLOAT_RANK * (len(others) + 1) * len(members)
        candidates.append(_candidate(FLOAT, [], whole, _size(members, {}, floats)))
        found.append(
            Cluster(
                name=members[0].group,
                groups=tuple(members),
                nodes=tuple(node.name for group in members for node in anchors[group.group]),
                candidates=tuple(candidates),
            )
        )
    return tuple(found)


def _candidate(scheme: str, noise: Iterable[float], precision: float, size: int) -> Candidate:
    total = sum(max(value, 0.0) for value in noise)
    return Candidate(scheme=scheme, noise=total, precision=precision, size=size)


def _size(members: Iterable[GroupCost], sizes: Mapping[str, int], floats: Mapping[str, int]) -> int:
    weights = dict.fromkeys(name for group in members for name in group.weights)
    return sum(sizes.get(name, floats.get(name, 0)) for name in weights)


def _anchors(gm: GraphModule) -> dict[str, list[Node]]:
    """The operators of each group: those that read a dequantize, by the names of the program."""
    found: dict[str, list[Node]] = {}
    for node in gm.graph.nodes:
        if node.op == "call_function" and not is_qdq(node):
            if any(is_dequantize(source) for source in node.all_input_nodes):
                found.setdefault(origin_name(node), []).append(node)
    return found


def _tied(
    groups: Sequence[GroupCost], anchors: Mapping[str, Sequence[Node]]
) -> list[list[GroupCost]]:
    """Groups that share a reason to move together, joined; in graph order."""
    parent = {group.group: group.group for group in groups}

    def root(name: str) -> str:
        while parent[name] != name:
            name = parent[name]
        return name

    first: dict[object, str] = {}
    for group in groups:
        for reason in _reasons(group, anchors.get(group.group, ())):
            parent[root(group.group)] = root(first.setdefault(reason, group.group))
    found: dict[str, list[GroupCost]] = {}
    for group in groups:
        if group.group in anchors:
            found.setdefault(root(group.group), []).append(group)
    return list(found.values())


def _reasons(group: GroupCost, nodes: Iterable[Node]) -> Iterable[object]:
    yield from (("weight", name) for name in group.weights)
    for node in nodes:
        source = _read(node) if is_product(node) else None
        if source is not None:
            yield "input", source


def _read(node: Node) -> Node | None:
    """The value that a product reads, before it is quantized."""
    value = node.args[0]
    if isinstance(value, Node) and is_dequantize(value):
        value = value.args[0]
        if isinstance(value, Node) and is_quantize(value):
            value = value.args[0]
    return value if isinstance(value, Node) else None


def constants_size(gm: GraphModule) -> int:
    """Bytes of all constants of a converted graph, qparams included."""
    return sum(r.size_after + r.qparams for r in provenance_of(gm).sizes)


def is_product(node: Node) -> bool:
    """Whether it is a linear operation: a product with a weight."""
    return is_call(node, _PRODUCTS)


def share_quantized(gm: GraphModule) -> float:
    """Of the linear operations of a converted graph: how many read a dequantized weight."""
    products = [node for node in gm.graph.nodes if is_product(node)]
    quantized = [n for n in products if isinstance(n.args[1], Node) and is_dequantize(n.args[1])]
    return len(quantized) / len(products) if products else 0.0
