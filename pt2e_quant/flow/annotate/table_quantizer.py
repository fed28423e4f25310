"""The quantizer made from a backend's op table: one loop over matches writes the annotations."""

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from pt2e_quant.core.errors import AnnotationError, ConfigError, near
from pt2e_quant.core.formats.scale_format import ScaleFormat
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.core.schemes import Role, Scheme, TensorScheme
from pt2e_quant.core.specs import (
    Q_ANNOTATION_KEY,
    EdgeOrNode,
    FixedQParamsQuantizationSpec,
    QuantizationAnnotation,
    QuantizationSpec,
    QuantizationSpecBase,
    SharedQuantizationSpec,
)
from pt2e_quant.flow.annotate.group_sizes import group_size_of
from pt2e_quant.flow.annotate.match_reader import MatchReader, Plan
from pt2e_quant.flow.annotate.observer_choice import ObserverChoice, derived_spec
from pt2e_quant.flow.annotate.quantizer import Quantizer
from pt2e_quant.flow.annotate.recurrent_layers import RecurrentForm, place_recurrent
from pt2e_quant.flow.annotate.rules import ALL_ROLES, QuantRule, RuleBook, RuleKind
from pt2e_quant.flow.qat.train_ranges import for_training
from pt2e_quant.graph.alias import WrittenPlaces
from pt2e_quant.graph.masks import find_masks
from pt2e_quant.graph.op_table import ALLOWED_KEY, OpKind, OpRow, OpTable, Preference, Slot
from pt2e_quant.graph.pattern import Op, find_matches
from pt2e_quant.graph.pipeline import GraphPass, run_passes
from pt2e_quant.graph.subgraphs import BODY_KEY, bodies
from pt2e_quant.observers.weights.weight_search import WeightSearch
from pt2e_quant.passes.algorithms.algorithm import Algorithm
from pt2e_quant.passes.algorithms.registry import algorithm_named, combined
from pt2e_quant.passes.caches.quantize_caches import quantize_caches
from pt2e_quant.passes.cleanup.linear_forms import pad_linears

RULE_KEY = "pt2e_quant.rule"
"""The key of `node.meta` that says which rule asked for a node's annotation."""

MASKS_KEY = "pt2e_quant.masks"
"""The key of `gm.meta` under which annotate leaves the masks it found, for prepare to take."""


_Specs: TypeAlias = dict[tuple[str, str, int], tuple[TensorScheme, QuantizationSpecBase]]
"""The spec of a slot of a row under a scheme (by its id, so that it is kept): one for all nodes."""


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
        self.finishing = tuple(finishing)
        self.recurrent = recurrent
        self.computes_in = computes_in
        self.preferences = preferences or {}
        self.allowed: frozenset[str] = frozenset()
        self.float_bodies = float_bodies
        self.pads_groups = False
        self.scales: ScaleFormat | None = None

    def set_global(self, scheme: Scheme | None) -> "TableQuantizer":
        """What every node gets that no other rule speaks about; None leaves them float."""
        return self._add(RuleKind.GLOBAL, "", scheme, ALL_ROLES)

    def set_module_name(
        self, name: str, scheme: Scheme | None, *, roles: Iterable[Role] = ALL_ROLES
    ) -> "TableQuantizer":
        """What the modules of a name get, with all inside them: a glob, or a regex after "re:"."""
        return self._add(RuleKind.MODULE_NAME, name, scheme, roles)

    def set_module_type(
        self,
        kind: type[nn.Module] | str,
        scheme: Scheme | None,
        *,
        roles: Iterable[Role] = ALL_ROLES,
    ) -> "TableQuantizer":
        """What the modules of a class get, with all inside them."""
        name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
        return self._add(RuleKind.MODULE_TYPE, name, scheme, roles)

    def set_operator(
        self, operator: object, scheme: Scheme | None, *, roles: Iterable[Role] = ALL_ROLES
    ) -> "TableQuantizer":
        """What the calls of an operator get: "aten.linear", "linear", or torch.ops.aten.linear."""
        return self._add(RuleKind.OPERATOR, str(operator), scheme, roles)

    def set_node(
        self, name: str, scheme: Scheme | None, *, roles: Iterable[Role] = ALL_ROLES
    ) -> "TableQuantizer":
        """What the nodes of a name get: a glob, or a regex after "re:"."""
        return self._add(RuleKind.NODE, name, scheme, roles)

    def _add(
        self, kind: RuleKind, pattern: str, scheme: Scheme | None, roles: Iterable[Role]
    ) -> "TableQuantizer":
        chosen = frozenset(Role(r) for r in roles)
        self.rules.append(QuantRule(kind=kind, pattern=pattern, scheme=scheme, roles=chosen))
        return self

    def with_observers(self, **changes: Any) -> "TableQuantizer":
        """Vary the observers, for example `with_observers(activation=MSEObserver)`."""
        self.observers = replace(self.observers, **changes)
        return self

    def with_search(self, search: str) -> "TableQuantizer":
        """How the scales of weights are found: "min_max", "mse" or "hqq".

        Raises:
            ConfigError: there is no such search.
        """
        return self.with_observers(search=WeightSearch.named(search))

    def with_scales(self, scales: ScaleFormat) -> "TableQuantizer":
        """Keep the scales of integer weights in another form, for example in float16.

        In memory and in files of `pt2e_quant.save`: XNNPACK and ONNX Runtime take float32 scales
        alone, and are given the same values in it. Small floats and code books keep the scales
        that their schemes say.
        """
        self.scales = scales
        return self

    def add_algorithm(self, algorithm: str | Algorithm) -> "TableQuantizer":
        """Do something to weights and ranges besides: "gptq", or `Gptq(damping=0.05)`.

        It replaces one of the same name. prepare refuses it if it applies to nothing.

        Raises:
            ConfigError: its name is unknown, or it does not go with one that is there.
        """
        made = algorithm_named(algorithm)
        self.algorithms = combined(self.algorithms, [made])
        self.asked_algorithms |= {made.name}
        return self

    def remove_algorithm(self, name: str) -> "TableQuantizer":
        """Leave out an algorithm of this name, also one that the recipe brings."""
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
        """Quantize also what the backend keeps float for these; see `quantizer.preferences`.

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
        """The same for training: fake-quantizes; what algorithms would choose is learned."""
        made = copy.copy(self)
        made.rules = list(self.rules)
        made.observers = for_training(self.observers)
        if self.asked_algorithms:
            raise ConfigError(
                f"{', '.join(sorted(self.asked_algorithms))} works on calibrated weights, which "
                "training changes",
                fix="leave it out of training, or quantize after training with prepare_pt2e",
            )
        made.algorithms = ()  # training starts from the weights that the user gave
        made.finishing = ()
        made.recurrent = None  # their steps run in one operator, which has no fake-quantizes inside
        return made

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        """Run the table's own passes."""
        model.meta[ALLOWED_KEY] = self.allowed
        if self._leaves_float(model):
            return model
        if self.recurrent is not None:
            place_recurrent(model, RuleBook(self.rules), self.recurrent)
        run_passes(model, self.transforms)
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
        made: _Specs = {}
        for row, match in matches:
            plan = reader.plans[row.name, match.anchor, match.covered]
            if row.kind is OpKind.MOVES and not plan.has_inputs(quantized):
                reader.refuse(match, "it only moves data, and its input is float")
                continue
            self._write(plan, book, made)
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

    def _write(self, plan: Plan, book: RuleBook, made: _Specs) -> None:
        for node in plan.match.covered:
            node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(_annotated=True)
        first = plan.match.covered[0]
        specs = self._specs(plan, made)
        for place, (spec, role) in specs.items():
            node = place if isinstance(place, Node) else place[1]
            annotation: QuantizationAnnotation = node.meta[Q_ANNOTATION_KEY]
            if isinstance(place, Node):
                annotation.output_qspec = spec
            else:
                annotation.input_qspec_map[place[0]] = _fixed_before(place[0], spec) or spec
            node.meta[RULE_KEY] = f"{book.rule_for(first, role)} (row {plan.row.name})"

    def _specs(
        self, plan: Plan, made: _Specs
    ) -> dict[EdgeOrNode, tuple[QuantizationSpecBase, Role]]:
        slots = {slot.at: slot for slot, _ in plan.schemes}
        found: dict[EdgeOrNode, tuple[QuantizationSpecBase, Role]] = {}
        for slot, scheme in plan.schemes:
            places = slot.places(plan.match)
            if slot.derived_from:
                sources = [slots[at].places(plan.match)[0] for at in slot.derived_from]
                found |= {p: (derived_spec(scheme, sources), slot.role) for p in places}
                continue
            key = plan.row.name, slot.at, id(scheme)
            if key not in made:
                made[key] = scheme, self.observers.spec(slot, self._kept(slot, scheme))
            spec = made[key][1]
            found |= {p: (spec, slot.role) for p in places}
        for group in plan.row.share:
            places = [p for at in group if at in slots for p in slots[at].places(plan.match)]
            for place in places[1:]:
                if place != places[0]:
                    found[place] = (SharedQuantizationSpec(places[0]), found[place][1])
        return found

    def _kept(self, slot: Slot, scheme: TensorScheme) -> TensorScheme:
        """A scheme that a row takes, with scales in the form asked for."""
        if self.scales is None or slot.role is not Role.WEIGHT or scheme.format is not None:
            return scheme
        return replace(scheme, scales=self.scales)

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


def _fixed_before(source: Node, spec: QuantizationSpecBase) -> FixedQParamsQuantizationSpec | None:
    """The spec of what a reader is given on a fixed scale, where it takes such integers.

    On a scale of its own it would round values once more that are on a grid already.
    """
    annotation = source.meta.get(Q_ANNOTATION_KEY)
    fixed = annotation.output_qspec if annotation is not None else None
    same = ("dtype", "quant_min", "quant_max")
    if not isinstance(fixed, FixedQParamsQuantizationSpec) or not isinstance(
        spec, QuantizationSpec
    ):
        return None
    takes = not spec.is_dynamic and spec.ch_axis is None
    return fixed if takes and all(getattr(fixed, n) == getattr(spec, n) for n in same) else None


def _computes_float(node: Node) -> bool:
    if node.op != "call_function":
        return False
    value = node.meta.get("val")
    first = value[0] if isinstance(value, (tuple, list)) and value else value
    return isinstance(first, Tensor) and first.is_floating_point()
