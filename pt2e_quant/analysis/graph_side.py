"""A graph as one side of a comparison: its values, by the names of the float program's nodes.

Every node knows the node of the exported program that it comes from (`origin_name`), in the float
graph as in one prepared or converted from it. Where several come from one (`silu` as a sigmoid and
a product) the last one has its value.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from pt2e_quant.backends.cut_graph import operators
from pt2e_quant.core.provenance import TensorRecord, provenance_of
from pt2e_quant.core.qdq import (
    CHOOSE_QPARAMS_OPS,
    STATIC_KINDS,
    float_name,
    is_dequantize,
    is_quantize,
    kind_of_qdq,
    read_qparams,
)
from pt2e_quant.core.qparams import QParams, fake_quantize
from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.flow.calibrate.calibrate import preserve_buffers
from pt2e_quant.flow.calibrate.sample import copied
from pt2e_quant.flow.prepare.prepared import is_observer
from pt2e_quant.graph.alias import aliased_argument
from pt2e_quant.graph.meta import constant_nodes, source_constant, value_name
from pt2e_quant.graph.ops import MAX_POOL1D, MAX_POOL2D, MAX_POOL3D, is_call
from pt2e_quant.passes.algorithms.scale_targets import (
    OUTPUT_FACTORS_KEY,
    column_factors,
    noted_factors,
)

_MAX_POOL = MAX_POOL1D + MAX_POOL2D + MAX_POOL3D

Visit: TypeAlias = Callable[["Site", Tensor], object]
"""Is shown each value as it is made."""


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """One activation of a graph.

    Args:
        name: of the float program's node.
        node: what makes the value.
        quantize: the quantize or observer that reads it; None if it stays float.
        qparams: of a quantize with constant scales for the whole tensor, else None.
        moved_from: the qparams that the value has already, where the node only moves data.
        factors: what an algorithm divided the value's channels by, None for nothing.
        record: of the quantized tensor, if there is one.
    """

    name: str
    node: Node
    quantize: Node | None
    qparams: QParams | None
    moved_from: QParams | None
    factors: Tensor | None
    record: TensorRecord | None = None

    @property
    def value(self) -> Node:
        """The node whose value the readers see: a dequantize or an observer if it has one."""
        if self.quantize is None or not is_quantize(self.quantize):
            return self.quantize or self.node
        return next(filter(is_dequantize, self.quantize.users), self.node)

    def to_program(self, value: Tensor) -> Tensor:
        """A value of this graph in the float program's units."""
        return value if self.factors is None else value * self.factors.to(value)

    def from_program(self, value: Tensor) -> Tensor:
        """A value of the float program in this graph's units."""
        return value if self.factors is None else value / self.factors.to(value)

    @property
    def range_kept(self) -> tuple[float, float] | None:
        """The smallest and largest value that the quantized tensor can have."""
        qparams = self.qparams
        if qparams is None:
            return None
        scale, zero = float(qparams.scale), float(qparams.zero_point)
        return (qparams.quant_min - zero) * scale, (qparams.quant_max - zero) * scale


@dataclass(frozen=True, slots=True, eq=False)
class WeightSite:
    """One constant of a graph.

    Args:
        name: the parameter's dotted name.
        node: whose value is the constant in float: a dequantize, an observer, or the constant.
        reader: the operator that reads it.
        qparams: constant ones, else None.
    """

    name: str
    node: Node
    reader: Node
    qparams: QParams | None

    def to_program(self, value: Tensor) -> Tensor:
        """A weight of this graph as the float program has it."""
        factors = self._factors(value)
        return value if factors is None else value / factors.to(value)

    def from_program(self, value: Tensor) -> Tensor:
        """A weight of the float program as algorithms made it in this graph."""
        factors = self._factors(value)
        return value if factors is None else value * factors.to(value)

    def _factors(self, weight: Tensor) -> Tensor | None:
        """Return the factor of a layer's weight, in a shape that broadcasts against it."""
        rows = noted_factors(self.reader, OUTPUT_FACTORS_KEY)
        found = column_factors(self.reader, self.node) if weight.dim() > 1 else None
        if rows is not None and weight.dim() and weight.shape[0] == rows.numel():
            rows = rows.reshape(-1, *[1] * (weight.dim() - 1))
            found = 1 / rows if found is None else found / rows
        return found


class GraphSide:
    """A float, prepared or q/dq graph whose values can be read, and replaced while it runs.

    Args:
        gm: the graph; a run leaves it as it is.
        words: what it is, for the title of a comparison.
        every: whether views of a quantized graph are values of their own, as of a float one.
    """

    def __init__(self, gm: GraphModule, words: str, *, every: bool = False) -> None:
        self.gm = gm
        self.words = words
        self.capture = capture_of(gm)
        self.constants = constant_nodes(gm.graph)
        self.is_quantized = any(is_dequantize(node) for node in gm.graph.nodes)
        self.can_be_fed = True
        self.unread: frozenset[str] = frozenset()
        self.sites = self._find_sites(every or not self.is_quantized)
        self.weights = self._find_weights()
        self.held: dict[str | Node, Any] = {}
        """Attributes by name, and weights in float by their dequantize: each is made once."""
        self.fixed = frozenset(
            site.node
            for site in self.weights.values()
            if is_dequantize(site.node) and self.constants.issuperset(site.node.all_input_nodes)
        )

    def run(
        self,
        leaves: Sequence[Any],
        visit: Visit,
        *,
        given: Mapping[str, Tensor] | None = None,
        weights: dict[str, Tensor] | None = None,
    ) -> list[Any]:
        """Run a call.

        Args:
            leaves: in placeholder order.
            visit: is shown each value, of a quantized one what is behind its dequantize.
            given: values by name that readers get in place of the graph's own.
            weights: takes the values of the weights, by name.

        Returns:
            The leaves of the result.
        """
        walk = _Walk(self, visit, given or {}, weights)
        with torch.no_grad(), preserve_buffers(self.gm, self.capture):
            result = walk.run(*copied(leaves), enable_io_processing=False)
        return pytree.tree_leaves(result, is_leaf=lambda value: value is None)

    def inputs_of(self, name: str, known: Mapping[str, Any]) -> set[str]:
        """The nearest known values that one depends on."""
        names = {site.node: site.name for site in self.sites.values() if site.name in known}
        found: set[str] = set()
        todo = list(self.sites[name].node.all_input_nodes)
        seen: set[Node] = set()
        while todo:
            node = todo.pop()
            if node in seen or node in self.constants:
                continue
            seen.add(node)
            if node in names:
                found.add(names[node])
            else:
                todo += node.all_input_nodes
        return found

    def _find_sites(self, every: bool) -> dict[str, Site]:
        # A float graph has every value: another graph may quantize a view.
        computing = {*(self.gm.graph.nodes if every else operators(self.gm))}
        records = provenance_of(self.gm).by_name()
        found: dict[str, Site] = {}
        for node in self.gm.graph.nodes:
            if node.op not in ("call_function", "placeholder") or node in self.constants:
                continue
            value = node.meta.get("val")
            if isinstance(value, Tensor) and not value.is_floating_point():
                continue
            if is_quantize(node) or is_dequantize(node) or node.target in CHOOSE_QPARAMS_OPS:
                continue
            quantize = next((user for user in node.users if self._quantizes(user, node)), None)
            if quantize is None and node not in computing and node.op != "placeholder":
                continue
            name = value_name(node) if node.op == "call_function" else str(node.target)
            found[name] = Site(
                name,
                node,
                quantize,
                self._per_tensor(quantize),
                self._moved_from(node),
                noted_factors(node, OUTPUT_FACTORS_KEY),
                records.get(node.name),
            )
        return found

    def _quantizes(self, user: Node, node: Node) -> bool:
        if not user.args or user.args[0] is not node:
            return False
        return is_quantize(user) or self.is_observed(user)

    def is_observed(self, node: Node) -> bool:
        """True if a node calls an observer."""
        if node.op != "call_module":
            return False
        return is_observer(self.gm.get_submodule(str(node.target)))

    def _per_tensor(self, node: Node | None) -> QParams | None:
        found = self._qparams(node)
        return found if found is not None and found.is_per_tensor else None

    def _qparams(self, node: Node | None) -> QParams | None:
        if node is None or kind_of_qdq(node) not in STATIC_KINDS:
            return None
        if any(source not in self.constants for source in node.all_input_nodes[1:]):
            return None
        return read_qparams(self.gm, node)

    def _moved_from(self, node: Node) -> QParams | None:
        """The qparams of what a node only moves: it cannot keep more than is there."""
        if not (is_call(node, _MAX_POOL) or aliased_argument(node) is not None):
            return None
        source = node.all_input_nodes[0]
        return self._per_tensor(source) if is_dequantize(source) else None

    def _find_weights(self) -> dict[str, WeightSite]:
        found: dict[str, WeightSite] = {}
        for node in self.gm.graph.nodes:
            source = self._constant_of(node)
            if source is None:
                continue
            reader = self._reader(node)
            if reader is not None:
                name = float_name(source)
                found.setdefault(name, WeightSite(name, node, reader, self._qparams(node)))
        return found

    def _constant_of(self, node: Node) -> Node | None:
        """The constant that a node gives in float; None for all else."""
        if is_dequantize(node) or self.is_observed(node):
            value = node.args[0]
            if isinstance(value, Node) and is_quantize(value):  # the unfolded form
                value = value.args[0]
            source = source_constant(value) if isinstance(value, Node) else None
            # Convert corrects biases, which is no error of theirs.
            is_bias = source is not None and self.is_observed(node) and not _is_weight(source)
            return None if is_bias else source
        if node.op != "get_attr" or not node.users or not _is_weight(node):
            return None
        observed = any(is_quantize(user) or self.is_observed(user) for user in node.users)
        return None if observed else node

    def _reader(self, node: Node) -> Node | None:
        """The first operator behind a constant, through views of it."""
        for user in node.users:
            if user in self.constants or aliased_argument(user) is node:
                if (reader := self._reader(user)) is not None:
                    return reader
            elif user.op == "call_function" and not is_quantize(user):
                return user
        return None


class _Walk(Interpreter):
    """Runs a graph, and shows each value."""

    def __init__(
        self,
        side: GraphSide,
        visit: Visit,
        given: Mapping[str, Tensor],
        weights: dict[str, Tensor] | None,
    ) -> None:
        super().__init__(side.gm)
        self.side = side
        self.visit = visit
        self.given = given
        self.by_node = {site.node: site for site in side.sites.values()}
        self.by_quantize = {s.quantize: s for s in self.by_node.values() if s.quantize is not None}
        self.unrounded: dict[Node, Tensor] = {}
        """Return the inputs of quantizes: values as computed, though other readers get others."""
        self.shown: set[Site] = set()
        self.weights = weights
        wanted = side.weights.values() if weights is not None else ()
        self.weight_names = {site.node: site.name for site in wanted}

    def fetch_attr(self, target: str) -> Any:
        """A constant, a buffer or a module; each is looked up in the first run alone."""
        if target not in self.side.held:
            self.side.held[target] = super().fetch_attr(target)
        return self.side.held[target]

    def run_node(self, n: Node) -> Any:
        """One node's value, or the one that is given in its place."""
        if n in self.side.fixed:
            return self._weight(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n in self.by_quantize or n.target in CHOOSE_QPARAMS_OPS:
            source = n.args[0]
            assert isinstance(source, Node)
            args = (self.unrounded.get(source, args[0]), *args[1:])
        if self.side.is_observed(n):
            value = _without_observing(self.side.gm.get_submodule(str(n.target)))(args[0])
        else:
            value = getattr(self, n.op)(n.target, args, kwargs)
        if self.weights is not None and n in self.weight_names:
            self.weights[self.weight_names[n]] = value
        for done in self.user_to_last_uses.get(n, ()):
            self.unrounded.pop(done, None)
        return self._handed_on(n, value)

    def _weight(self, n: Node) -> Any:
        """A constant weight in float; its dequantize is run in the first run alone."""
        held = self.side.held
        if n not in held:
            held[n] = super().run_node(n)
        if self.weights is not None:
            self.weights[self.weight_names[n]] = held[n]
        return held[n]

    def _handed_on(self, n: Node, value: Any) -> Any:
        """Show a value that is complete; returns what readers get."""
        site = self.by_node.get(n) or self._behind(n)
        if site is None or not isinstance(value, Tensor):
            return value
        if n is site.node and site.quantize is not None:
            self.unrounded[n] = value
        elif site not in self.shown:
            self.shown.add(site)
            self.visit(site, value)
        given = self.given.get(site.name)
        return value if given is None else given.to(value.dtype)

    def _behind(self, n: Node) -> Site | None:
        """The value that a dequantize or an observer gives; None for other nodes."""
        if self.side.is_observed(n):
            return self.by_quantize.get(n)
        source = n.args[0] if is_dequantize(n) else None
        return self.by_quantize.get(source) if isinstance(source, Node) else None


def _is_weight(constant: Node) -> bool:
    value = constant.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1


def _without_observing(observer: Any) -> Any:
    """A copy of an observer or fake-quantize that does not change its ranges."""
    made = copy.deepcopy(observer)
    if hasattr(made, "disable_observer"):
        made.disable_observer()
        return made.eval()
    return _identity


def _identity(value: Tensor) -> Tensor:
    return value


def moved(site: Site, value: Tensor) -> Tensor:
    """Return a value's integers for a node that only moves it."""
    if site.moved_from is None or not math.isfinite(float(value.sum())):
        return value
    return fake_quantize(value.float(), site.moved_from)
