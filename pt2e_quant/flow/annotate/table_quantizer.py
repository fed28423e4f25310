"""The quantizer made from a backend's op table: one loop over matches writes the annotations."""

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from pt2e_quant.core.errors import AnnotationError, ConfigError, near
from pt2e_quant.core.formats.scale_format import ScaleFormat
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.core.schemes import Role, Scheme
from pt2e_quant.core.specs import (
    Q_ANNOTATION_KEY,
)
from pt2e_quant.flow.annotate.group_sizes import group_size_of
from pt2e_quant.flow.annotate.match_reader import MatchReader
from pt2e_quant.flow.annotate.observer_choice import ObserverChoice
from pt2e_quant.flow.annotate.quantizer import Quantizer
from pt2e_quant.flow.annotate.recurrent_layers import RecurrentForm, place_recurrent
from pt2e_quant.flow.annotate.rules import ALL_ROLES, QuantRule, RuleBook, RuleKind
from pt2e_quant.flow.annotate.write_annotations import AnnotationWriter
from pt2e_quant.flow.qat.train_ranges import for_training
from pt2e_quant.graph.alias import WrittenPlaces
from pt2e_quant.graph.idioms.attention_masks import find_masks
from pt2e_quant.graph.op_table import ALLOWED_KEY, OpKind, OpRow, OpTable, Preference
from pt2e_quant.graph.pattern import Op, find_matches
from pt2e_quant.graph.pipeline import GraphPass, run_passes
from pt2e_quant.graph.subgraphs import BODY_KEY, bodies
from pt2e_quant.observers.weights.weight_search import WeightSearch
from pt2e_quant.passes.algorithms.algorithm import Algorithm
from pt2e_quant.passes.algorithms.registry import algorithm_named, combined
from pt2e_quant.passes.caches.quantize_caches import quantize_caches
from pt2e_quant.passes.cleanup.linear_forms import pad_linears
from pt2e_quant.passes.cleanup.pool_windows import fixed_windows

MASKS_KEY = "pt2e_quant.masks"
"""The key of `gm.meta` under which annotate leaves the masks it found, for prepare to take."""


class TableQuantizer(Quantizer):
    """Annotates what an op table can run, where the rules ask for it.

    Args:
        table: what the backend runs.
        scheme: what every node gets unless a rule says otherwise.
        observers: which observers are used.
        rules: further rules, as the `set_…` methods add them.
        transforms: passes that `transform_for_annotation` runs.
        algorithms: what is done to weights and ranges besides; `add_algorithm` adds to them.
        finishing: passes that convert runs on the q/dq graph.
        placing: passes on a q/dq graph that take operators out of integers; convert runs them
            before its algorithms, so that these see what is rounded, and once more behind them.
        recurrent: how a backend runs recurrent layers in integers; None leaves them float.
        computes_in: the float dtypes that the backend has kernels for: prepare lets the model
            compute in float32 instead of others (`compute_in_float32`). None leaves all.
        preferences: by name, what keeps operators float that the table could run.
        float_bodies: why bodies of control flow stay float on this backend; "" if they do not.
    """

    def __init__(
        self,
        table: OpTable,
        scheme: Scheme | None,
        *,
        observers: ObserverChoice | None = None,
        rules: Sequence[QuantRule] = (),
        transforms: Sequence[GraphPass] = (),
        algorithms: Sequence[Algorithm] = (),
        finishing: Sequence[GraphPass] = (),
        placing: Sequence[GraphPass] = (),
        recurrent: RecurrentForm | None = None,
        computes_in: Collection[torch.dtype] | None = None,
        preferences: Mapping[str, Preference] | None = None,
        float_bodies: str = "",
    ) -> None:
        self.table = table
        self.scheme = scheme
        self.observers = observers or ObserverChoice()
        self.rules = [QuantRule(kind=RuleKind.GLOBAL, scheme=scheme), *rules]
        self.transforms = tuple(transforms)
        self.algorithms = tuple(algorithms)
        self.asked_algorithms: frozenset[str] = frozenset()
        self.ruled_algorithms: frozenset[str] = frozenset()
        self.finishing = tuple(finishing)
        self.placing = tuple(placing)
        self.recurrent = recurrent
        self.computes_in = computes_in
        self.preferences = preferences or {}
        self.allowed: frozenset[str] = frozenset()
        self.float_bodies = float_bodies
        self.pads_groups = False
        self.scales: ScaleFormat | None = None

    def set_global(self, scheme: Scheme | None) -> "TableQuantizer":
        """Set the scheme of all nodes that no other rule selects; None leaves them float."""
        return self._add(RuleKind.GLOBAL, "", scheme, ALL_ROLES)

    def set_module_name(
        self, name: str, scheme: Scheme | None, *, roles: Iterable[Role] = ALL_ROLES
    ) -> "TableQuantizer":
        """Set the scheme of modules and all inside them, by name: a glob, or "re:" and a regex."""
        return self._add(RuleKind.MODULE_NAME, name, scheme, roles)

    def set_module_type(
        self,
        kind: type[nn.Module] | str,
        scheme: Scheme | None,
        *,
        roles: Iterable[Role] = ALL_ROLES,
    ) -> "TableQuantizer":
        """Set the scheme of all modules of a class, and of their submodules."""
        name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
        return self._add(RuleKind.MODULE_TYPE, name, scheme, roles)

    def set_operator(
        self, operator: object, scheme: Scheme | None, *, roles: Iterable[Role] = ALL_ROLES
    ) -> "TableQuantizer":
        """Set the scheme of an operator: "aten.linear", "linear", or torch.ops.aten.linear."""
        return self._add(RuleKind.OPERATOR, str(operator), scheme, roles)

    def set_node(
        self, name: str, scheme: Scheme | None, *, roles: Iterable[Role] = ALL_ROLES
    ) -> "TableQuantizer":
        """Set the scheme of nodes by name: a glob, or "re:" and a regex.

        The name of the exported program, as `compare` and `sensitivity` give it, or that of the
        prepared graph where they differ.
        """
        return self._add(RuleKind.NODE, name, scheme, roles)

    def add_rule(
        self, rule: QuantRule, algorithms: Sequence[str | Algorithm] = ()
    ) -> "TableQuantizer":
        """Add a rule that brings observers or algorithms of its own.

        Args:
            rule: selects nodes, and says how they are quantized.
            algorithms: those that the rule names and this quantizer does not have; they are
                applied only to the nodes that the rule selects.
        """
        there = {algorithm.name for algorithm in self.algorithms}
        new = [a for a in map(algorithm_named, algorithms) if a.name not in there]
        every = (*self.algorithms, *new)
        made = combined(self.algorithms, new)
        # A recipe's own rounding stays where no rule brings another.
        made = (*made, *(a for a in every if a.name not in {kept.name for kept in made}))
        self.algorithms = tuple(sorted(made, key=lambda algorithm: algorithm.stage))
        self.ruled_algorithms |= {algorithm.name for algorithm in new}
        self.rules.append(rule)
        return self

    def _add(
        self, kind: RuleKind, pattern: str, scheme: Scheme | None, roles: Iterable[Role]
    ) -> "TableQuantizer":
        chosen = frozenset(Role(r) for r in roles)
        self.rules.append(QuantRule(kind=kind, pattern=pattern, scheme=scheme, roles=chosen))
        return self

    def with_observers(self, **changes: Any) -> "TableQuantizer":
        """Replace observers, for example `with_observers(activation=MSEObserver)`."""
        self.observers = replace(self.observers, **changes)
        return self

    def with_search(self, search: str) -> "TableQuantizer":
        """Choose how the scales of weights are found: "min_max", "mse" or "hqq".

        Raises:
            ConfigError: there is no such search.
        """
        return self.with_observers(search=WeightSearch.named(search))

    def with_scales(self, scales: ScaleFormat) -> "TableQuantizer":
        """Keep the scales of integer weights in another form, for example in float16.

        This holds in memory and in files of `pt2e_quant.save`. XNNPACK and ONNX Runtime take only
        float32 scales, so lowering converts them. Float formats and code books keep the scale
        dtype of their schemes.
        """
        self.scales = scales
        return self

    def add_algorithm(self, algorithm: str | Algorithm) -> "TableQuantizer":
        """Add an algorithm for weights or ranges: "gptq", or `Gptq(damping=0.05)`.

        It replaces one of the same name. prepare refuses it if it applies to nothing.

        Raises:
            ConfigError: its name is unknown, or it conflicts with one that was added before.
        """
        made = algorithm_named(algorithm)
        self.algorithms = combined(self.algorithms, [made])
        self.asked_algorithms |= {made.name}
        return self

    def remove_algorithm(self, name: str) -> "TableQuantizer":
        """Remove the algorithm of this name, whether it was added or is part of the recipe."""
        there = [algorithm.name for algorithm in self.algorithms]
        if name not in there:
            raise ConfigError(f'this quantizer has no algorithm "{name}": {near(name, there)}')
        self.algorithms = tuple(a for a in self.algorithms if a.name != name)
        self.asked_algorithms -= {name}
        return self

    def quantize_caches(self, bits: int = 8, names: str = "*") -> "TableQuantizer":
        """Keep written float buffers (key and value caches) in 8 or 4 bits.

        Args:
            bits: 8 or 4.
            names: a glob of the buffers' dotted names.
        """
        self.finishing += (quantize_caches(bits, names),)
        return self

    def allowing(self, *names: str) -> "TableQuantizer":
        """Overrule preferences of the backend, which keep operators float; see `self.preferences`.

        Raises:
            ConfigError: there is no such preference; near names are offered.
        """
        for name in names:
            if name not in self.preferences:
                known = near(name, self.preferences)
                raise ConfigError(f'{self.table.backend} has no preference "{name}": {known}')
        self.allowed |= set(names)
        return self

    def pad_groups(self) -> "TableQuantizer":
        """Pad linears with zero columns where a scheme's groups do not divide their weights."""
        self.pads_groups = True
        return self

    def for_qat(self) -> "TableQuantizer":
        """A copy for training: with fake-quantizes, and without algorithms."""
        made = copy.copy(self)
        made.rules = [
            rule
            if rule.observers is None
            else replace(rule, observers=for_training(rule.observers))
            for rule in self.rules
        ]
        made.observers = for_training(self.observers)
        if self.asked_algorithms:
            raise ConfigError(
                f"{', '.join(sorted(self.asked_algorithms))} works on calibrated weights, which "
                "training changes",
                fix="leave it out of training, or quantize after training with prepare_pt2e",
            )
        made.algorithms = ()  # training starts from the weights that the user gave
        made.ruled_algorithms = frozenset()
        made.finishing = made.placing = ()
        made.recurrent = None  # their steps run in one operator, which has no fake-quantizes inside
        return made

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        """Run the table's own passes."""
        model.meta[ALLOWED_KEY] = self.allowed
        if self._leaves_float(model):
            return model
        if self.recurrent is not None:
            place_recurrent(model, RuleBook(self.rules), self.recurrent)
        run_passes(model, (fixed_windows, *self.transforms))
        if self.pads_groups:
            book = RuleBook(self.rules)
            run_passes(model, (pad_linears(lambda node: group_size_of(book.scheme_for(node))),))
        return model

    def annotate(self, model: GraphModule) -> GraphModule:
        """Write an annotation on every node that a row takes and a rule asks for.

        Raises:
            AnnotationError: a rule selects nothing in this graph.
        """
        nodes = [n for n in model.graph.nodes if _computes_float(n)]
        book = RuleBook(self.rules)
        if BODY_KEY not in model.meta:
            inner = (n for body in bodies(model) for n in body.gm.graph.nodes)
            book.check_all_matched([*nodes, *(n for n in inner if _computes_float(n))])
        masks = find_masks(model)
        model.meta[MASKS_KEY] = masks
        reader = MatchReader(
            self.table,
            book,
            masks,
            WrittenPlaces(model.graph),
            preferences=self.preferences,
            allowed=self.allowed,
        )
        matches = find_matches(model.graph, self._patterns(), reader.accept)
        if self._leaves_float(model):
            reader.leave(nodes, self.float_bodies)
            matches = []
        done: set[Node] = set()
        quantized: set[Node] = set()
        names = (algorithm.name for algorithm in self.algorithms)
        writer = AnnotationWriter(book, self.observers, names, self.ruled_algorithms, self.scales)
        for row, match in matches:
            plan = reader.plans[row.name, match.anchor, match.covered]
            if row.kind is OpKind.MOVES and not plan.has_inputs(quantized):
                reader.refuse(match, "it only moves data, and its input is float")
                continue
            writer.write(plan)
            done.update(match.covered)
            quantized.update(plan.outputs())
        provenance = provenance_of(model)
        provenance.quantizer = f"{self.table.backend} table"
        provenance.set_floats([reader.record(n) for n in nodes if n not in done])
        return model

    def _leaves_float(self, model: GraphModule) -> bool:
        return bool(self.float_bodies) and BODY_KEY in model.meta

    def _patterns(self) -> list[tuple[OpRow, Op]]:
        """The patterns of rows that some rule's scheme may suit.

        Of operators that no such row is for, every pattern: their refusals say why.
        """
        offered = {
            role: [rule.scheme.for_role(role) if rule.scheme else None for rule in self.rules]
            for role in Role
        }
        suited = {
            row.name
            for row in self.table
            if all(any(s.suits(offer) for offer in offered[s.role]) for s in row.slots)
        }
        patterns = self.table.patterns()
        served = {m.target for row, op in patterns if row.name in suited for m in op.members}
        return [
            (row, op)
            for row, op in patterns
            if row.name in suited or not any(m.target in served for m in op.members)
        ]

    def validate(self, model: GraphModule) -> None:
        """Refuse an annotated graph with a per-channel axis that its constant does not have.

        Raises:
            AnnotationError: naming the node and the axis.
        """
        for node in model.graph.nodes:
            annotation = node.meta.get(Q_ANNOTATION_KEY)
            if annotation is None:
                continue
            for source, spec in annotation.input_qspec_map.items():
                axis = getattr(spec, "ch_axis", None)
                value = source.meta.get("val")
                if axis is not None and isinstance(value, Tensor) and axis >= value.dim():
                    raise AnnotationError(
                        f"per-channel axis {axis} of {source.name}, which has {value.dim()} "
                        "dimensions",
                        node=node,
                    )


def _computes_float(node: Node) -> bool:
    if node.op != "call_function":
        return False
    value = node.meta.get("val")
    first = value[0] if isinstance(value, (tuple, list)) and value else value
    return isinstance(first, Tensor) and first.is_floating_point()
