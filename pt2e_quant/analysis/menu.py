"""The options of `tune`: groups of a program that change together, and schemes for them."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch.fx import GraphModule, Node

from pt2e_quant.analysis.group_costs import GroupCost, Sensitivity
from pt2e_quant.analysis.latency import Latency
from pt2e_quant.analysis.solve import Candidate
from pt2e_quant.backends.target.recipe_file import FLOAT, NodeScheme, RecipeFile
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.core.qdq import is_dequantize, is_qdq
from pt2e_quant.graph.meta import ORIGIN_KEY, origin_name
from pt2e_quant.graph.ops import (
    ADD,
    ADDMM,
    CONV,
    CONV_TRANSPOSE,
    LINEAR,
    MAX_POOL1D,
    MAX_POOL2D,
    MAX_POOL3D,
    MM,
    RELU,
    RELU6,
    VIEWS,
    is_call,
)

_MOVES = (*VIEWS, *MAX_POOL1D, *MAX_POOL2D, *MAX_POOL3D)
_ACTIVATIONS = (*RELU, *RELU6)
_PRODUCTS = (*LINEAR, *CONV, *CONV_TRANSPOSE, *ADDMM, *MM)
"""The linear operations: products with weights."""

_FLOAT_RANK = 4
"""The factor of float over the rank of a menu's last recipe, where recipes are given up."""

_OF_THE_RECIPE = 0.05
"""The rank of an option with other ranges or algorithms, as a share of another recipe's rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option of a group besides the recipe: "w8", "int8@mse", "w4_g32+gptq", "float".

    Args:
        recipe: of the backend, or "float".
        ranges: how ranges of activations are found (after "@"); "" as the recipe has it.
        algorithms: that are applied too (each after "+").
    """

    recipe: str
    ranges: str = ""
    algorithms: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str) -> "Option":
        """The option of a name.

        >>> Option.of("int8@mse+gptq")
        Option(recipe='int8', ranges='mse', algorithms=('gptq',))
        """
        plain, *algorithms = name.split("+")
        recipe, _, ranges = plain.partition("@")
        return cls(recipe=recipe, ranges=ranges, algorithms=tuple(algorithms))

    def throughout(self, base: RecipeFile) -> RecipeFile:
        """The recipe file that gives every node this option."""
        if self.recipe == FLOAT:
            return replace(base, rules=(NodeScheme(node="*", scheme=FLOAT),))
        if self.recipe != base.recipe:
            base = RecipeFile(backend=base.backend, recipe=self.recipe)
        algorithms = tuple(dict.fromkeys((*base.algorithms, *self.algorithms)))
        return replace(base, ranges=self.ranges or base.ranges, algorithms=algorithms)

    def rule(self, node: str, why: str) -> NodeScheme:
        """The rule that gives one node this option."""
        return NodeScheme(
            node=node, scheme=self.recipe, ranges=self.ranges, algorithms=self.algorithms, why=why
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Uniform:
    """A program with one option throughout.

    Args:
        name: of the option.
        gm: the converted graph.
        costs: what each group costs alone.
        latency: where it was measured.
    """

    name: str
    gm: GraphModule
    costs: Sensitivity
    latency: Latency | None = None

    @property
    def size(self) -> int:
        """Bytes of all constants in a file."""
        return constants_size(self.gm)

    def sizes(self) -> dict[str, int]:
        """Bytes of each constant in a file, qparams included."""
        return stored_sizes(self.gm)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Groups that move together.

    Args:
        name: of the first one.
        groups: in graph order.
        nodes: in the graph that the recipe annotates, with the schemes that quantize each.
        candidates: the schemes that it can have. The first is what the base recipe gives it, which
            is float where it quantizes none of the groups.
    """

    name: str
    groups: tuple[GroupCost, ...]
    nodes: Mapping[str, frozenset[str]]
    candidates: tuple[Candidate, ...]

    def rules(self, scheme: str, why: str) -> list[NodeScheme]:
        """Rules that give all its nodes a scheme, or float where the scheme does not quantize."""
        chosen, left = Option.of(scheme), Option(recipe=FLOAT)
        return [
            (chosen if scheme in schemes else left).rule(node, why)
            for node, schemes in self.nodes.items()
        ]


def clusters_of(
    base: Uniform, others: Sequence[Uniform], of_float: Latency | None = None
) -> tuple[Cluster, ...]:
    """The groups of a program that a recipe of the menu quantizes, tied where they belong together.

    Linear operations that read one value (query, key and value of attention) are tied, for they
    share its quantized form; so are operators that share a weight, the adds of one residual stream,
    and what only moves data with what made the data, for both have the same qparams. A scheme that
    quantizes some groups of a cluster leaves the others float.

    Args:
        base: quantized with the recipe that is varied.
        others: quantized with the other schemes of the menu.
        of_float: what the float program takes, where that was measured.
    """
    uniforms = (base, *others)
    groups, anchors = _groups(uniforms)
    sizes = {uniform.name: uniform.sizes() for uniform in uniforms}
    floats = {r.name: r.size_before for r in provenance_of(base.gm).sizes}
    found = []
    for members in _tied(groups, anchors):
        known = {
            uniform.name: [c for g in members if (c := uniform.costs.group(g.group)) is not None]
            for uniform in uniforms
        }
        candidates = []
        for rank, uniform in enumerate(uniforms):
            if costs := known[uniform.name]:
                size = _size(members, sizes[uniform.name], floats)
                given_up = _rank(base.name, uniform.name, rank) * len(members)
                took = _time(members, uniform.latency)
                noise = [cost.cost for cost in costs]
                candidates.append(_candidate(uniform.name, noise, given_up, size, took))
        whole = _FLOAT_RANK * len(uniforms) * len(members) if known[base.name] else 0.0
        size, took = _size(members, {}, floats), _time(members, of_float)
        left = _candidate(FLOAT, [], whole, size, took)
        nodes = {
            node.name: frozenset(n for n, costs in known.items() if _has(costs, group.group))
            for group in members
            for node in anchors[group.group]
            if ORIGIN_KEY not in node.meta  # else an algorithm puts it there, behind the rules
        }
        found.append(
            Cluster(
                name=members[0].group,
                groups=tuple(members),
                nodes=nodes,
                candidates=(*candidates, left) if known[base.name] else (left, *candidates),
            )
        )
    return tuple(found)


def _groups(uniforms: Sequence[Uniform]) -> tuple[list[GroupCost], dict[str, list[Node]]]:
    """The groups that any recipe quantizes, in graph order, and their operators.

    The operators are those of the first graph, whose names the rules have to give; ties are the
    same in all.
    """
    base = uniforms[0].gm
    anchors = _anchors(base)
    groups = {group.group: group for uniform in reversed(uniforms) for group in uniform.costs}
    for uniform in uniforms[1:]:
        for name, nodes in _anchors(uniform.gm).items():
            targets = {node.target for node in nodes}
            if name not in anchors:
                same = [n for n in base.graph.nodes if n.target in targets]
                anchors[name] = [node for node in same if origin_name(node) == name]
    places = {origin_name(node): at for at, node in enumerate(base.graph.nodes)}
    held = [group for name, group in groups.items() if anchors.get(name)]
    return sorted(held, key=lambda group: places.get(group.group, 0)), anchors


def _has(costs: Iterable[GroupCost], name: str) -> bool:
    return any(cost.group == name for cost in costs)


def _candidate(
    scheme: str, noise: Iterable[float], precision: float, size: int, time_us: float
) -> Candidate:
    total = sum(max(value, 0.0) for value in noise)
    return Candidate(scheme=scheme, noise=total, precision=precision, size=size, time_us=time_us)


def _rank(base: str, name: str, place: int) -> float:
    """Return an option's distance from the recipe; small if ranges or algorithms alone differ."""
    is_same = Option.of(name).recipe == base
    return _OF_THE_RECIPE * place if is_same else place


def _time(members: Iterable[GroupCost], latency: Latency | None) -> float:
    return 0.0 if latency is None else sum(latency.groups.get(m.group, 0.0) for m in members)


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
        for reason in _reasons(group, anchors[group.group], anchors):
            parent[root(group.group)] = root(first.setdefault(reason, group.group))
    found: dict[str, list[GroupCost]] = {}
    for group in groups:
        found.setdefault(root(group.group), []).append(group)
    return list(found.values())


def _reasons(group: GroupCost, nodes: Iterable[Node], names: Collection[str]) -> Iterable[object]:
    yield from (("weight", name) for name in group.weights)
    for node in nodes:
        source = quantized_value(node.args[0]) if node.args else None
        if is_product(node) and source is not None:
            yield "input", source
        if is_call(node, ADD):
            yield "stream", _stream(node)
        if source is not None and is_call(node, _MOVES):
            yield "made by", _maker(source, names)
    yield "made by", group.group


def _maker(value: Node, names: Collection[str]) -> str:
    """The group that a value comes out of, through operators that are in no group."""
    while origin_name(value) not in names and len(value.all_input_nodes) == 1:
        before = quantized_value(value.all_input_nodes[0])
        if before is None:
            break
        value = before
    return origin_name(value)


def quantized_value(value: object) -> Node | None:
    """Return the float inputs of an operator, in front of their quantizes."""
    while isinstance(value, Node) and is_qdq(value):
        value = value.args[0]
    return value if isinstance(value, Node) else None


def _stream(add: Node) -> str:
    """The first add of a residual stream: each reads the one before, or its activation."""
    first, todo = add, [add]
    while todo:
        node = todo.pop()
        for value in map(quantized_value, node.all_input_nodes):
            if value is not None and is_call(value, (*ADD, *_ACTIVATIONS)):
                first = value if is_call(value, ADD) else first
                todo = [value]
                break
    return first.name


def constants_size(gm: GraphModule) -> int:
    """Bytes that the constants of a converted graph take in a file, qparams included."""
    return sum(r.size_after + r.qparams for r in provenance_of(gm).sizes)


def stored_sizes(gm: GraphModule) -> dict[str, int]:
    """Bytes that each constant of a converted graph takes in a file, qparams included."""
    return {r.name: r.size_after + r.qparams for r in provenance_of(gm).sizes}


def is_product(node: Node) -> bool:
    """True if it is a linear operation: a product with a weight."""
    return is_call(node, _PRODUCTS)


def share_quantized(gm: GraphModule) -> float:
    """Return the share of a converted graph's linear operations that read a dequantized weight."""
    products = [node for node in gm.graph.nodes if is_product(node)]
    quantized = [n for n in products if isinstance(n.args[1], Node) and is_dequantize(n.args[1])]
    return len(quantized) / len(products) if products else 0.0
