"""Writes a quantizer's plans into a graph: specs, the rule that asked, algorithms left out."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch.fx import Node

from pt2e_quant.core.formats.scale_format import ScaleFormat
from pt2e_quant.core.schemes import Role, TensorScheme
from pt2e_quant.core.specs import (
    Q_ANNOTATION_KEY,
    EdgeOrNode,
    FixedQParamsQuantizationSpec,
    QuantizationAnnotation,
    QuantizationSpec,
    QuantizationSpecBase,
    SharedQuantizationSpec,
)
from pt2e_quant.flow.annotate.match_reader import Plan
from pt2e_quant.flow.annotate.observer_choice import ObserverChoice, derived_spec
from pt2e_quant.flow.annotate.rules import RuleBook
from pt2e_quant.graph.clamps import clamp_bounds
from pt2e_quant.graph.op_table import Slot
from pt2e_quant.graph.ops import PAD, argument, is_call
from pt2e_quant.passes.algorithms.algorithm import BARRED_KEY

RULE_KEY = "pt2e_quant.rule"
"""The key of `node.meta` that says which rule asked for a node's annotation."""


class AnnotationWriter:
    """Writes the plans of one graph.

    Args:
        book: the rules.
        observers: of nodes whose rule names none.
        algorithms: the names of all algorithms of the quantizer.
        ruled: the names of those that only some rules ask for.
        scales: the form of integer weights' scales; None as the schemes say.
    """

    def __init__(
        self,
        book: RuleBook,
        observers: ObserverChoice,
        algorithms: Iterable[str],
        ruled: frozenset[str],
        scales: ScaleFormat | None,
    ) -> None:
        self.book = book
        self.observers = observers
        self.algorithms = frozenset(algorithms)
        self.ruled = ruled
        self.scales = scales
        self._made: dict[
            tuple[str, str, int, int], tuple[TensorScheme, ObserverChoice, QuantizationSpecBase]
        ] = {}
        """The spec of a slot of a row under a scheme and observers, one for all nodes. Ids are keys
        because hashing a scheme is slow; the objects are kept so that no id is used again."""

    def write(self, plan: Plan) -> None:
        """Write the annotations of what a plan covers."""
        first = plan.match.covered[0]
        barred = self._barred(first)
        for node in plan.match.covered:
            node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(_annotated=True)
            node.meta.pop(BARRED_KEY, None)
            if barred:
                node.meta[BARRED_KEY] = barred
        groups = {places[0]: places for places in _groups(plan)}
        for place, (spec, role) in self._specs(plan, groups.values()).items():
            node = place if isinstance(place, Node) else place[1]
            annotation: QuantizationAnnotation = node.meta[Q_ANNOTATION_KEY]
            if isinstance(place, Node):
                annotation.output_qspec = spec
            else:
                fixed = _fixed_before(place[0], spec, groups.get(place, []))
                annotation.input_qspec_map[place[0]] = fixed or spec
            node.meta[RULE_KEY] = f"{self.book.rule_for(first, role)} (row {plan.row.name})"

    def _barred(self, node: Node) -> list[str]:
        """The algorithms that the rule of a node does not ask for."""
        rule = self.book.rule_for(node, Role.WEIGHT)
        asked = None if rule is None else rule.algorithms
        return sorted(self.ruled if asked is None else self.algorithms - asked)

    def _observers(self, node: Node, role: Role) -> ObserverChoice:
        rule = self.book.rule_for(node, role)
        return self.observers if rule is None or rule.observers is None else rule.observers

    def _specs(
        self, plan: Plan, groups: Iterable[Sequence[EdgeOrNode]]
    ) -> dict[EdgeOrNode, tuple[QuantizationSpecBase, Role]]:
        slots = {slot.at: slot for slot, _ in plan.schemes}
        found: dict[EdgeOrNode, tuple[QuantizationSpecBase, Role]] = {}
        for slot, scheme in plan.schemes:
            places = slot.places(plan.match)
            if slot.derived_from:
                sources = [slots[at].places(plan.match)[0] for at in slot.derived_from]
                found |= {p: (derived_spec(scheme, sources), slot.role) for p in places}
                continue
            chosen = self._observers(plan.match.covered[0], slot.role)
            key = plan.row.name, slot.at, id(scheme), id(chosen)
            if key not in self._made:
                spec = chosen.spec(slot, self._kept(slot, scheme))
                self._made[key] = scheme, chosen, spec
            spec = self._made[key][2]
            found |= {p: (spec, slot.role) for p in places}
        for first, *others in groups:
            for place in others:
                if place != first:
                    found[place] = (SharedQuantizationSpec(first), found[place][1])
        return found

    def _kept(self, slot: Slot, scheme: TensorScheme) -> TensorScheme:
        """A scheme with its scales in the dtype that the user asked for."""
        if self.scales is None or slot.role is not Role.WEIGHT or scheme.format is not None:
            return scheme
        return replace(scheme, scales=self.scales)


def _groups(plan: Plan) -> list[list[EdgeOrNode]]:
    """The places of a plan that share their qparams, the first of which has them."""
    slots = {slot.at: slot for slot, _ in plan.schemes}
    found = (
        [p for at in group if at in slots for p in slots[at].places(plan.match)]
        for group in plan.row.share
    )
    return [places for places in found if places]


def _fixed_before(
    source: Node, spec: QuantizationSpecBase, sharing: Sequence[EdgeOrNode]
) -> FixedQParamsQuantizationSpec | None:
    """The fixed spec of the value that an operator reads, where the operator accepts it.

    With a scale of its own the reader would round values that are on a grid already. Of several
    tensors with one scale (a concatenation), all have to be on that grid.

    Args:
        source: the value.
        spec: that the operator would give it.
        sharing: the places with the same qparams as this one.
    """
    fixed = _fixed_output(source)
    if fixed is None or not isinstance(spec, QuantizationSpec):
        return None
    same = ("dtype", "quant_min", "quant_max")
    takes = not spec.is_dynamic and spec.ch_axis is None
    if not takes or any(getattr(fixed, n) != getattr(spec, n) for n in same):
        return None
    are_on_it = all(
        not _leaves(p, fixed) if isinstance(p, Node) else _fixed_output(p[0]) == fixed
        for p in sharing
    )
    return fixed if are_on_it else None


def _fixed_output(node: Node) -> FixedQParamsQuantizationSpec | None:
    """The fixed spec of a value, also of one that has it from what its operator moves."""
    annotation = node.meta.get(Q_ANNOTATION_KEY)
    if annotation is None:
        return None
    spec = annotation.output_qspec
    if isinstance(spec, SharedQuantizationSpec) and isinstance(spec.edge_or_node, tuple):
        spec = annotation.input_qspec_map.get(spec.edge_or_node[0])
    return spec if isinstance(spec, FixedQParamsQuantizationSpec) else None


def _leaves(node: Node, fixed: FixedQParamsQuantizationSpec) -> bool:
    """True if an operator that moves values puts numbers beyond a grid among them."""
    if fixed.quant_min is None or fixed.quant_max is None:
        return False
    low, high = (
        (end - fixed.zero_point) * fixed.scale for end in (fixed.quant_min, fixed.quant_max)
    )
    if is_call(node, PAD):
        value = argument(node, "value") or 0.0
        return not low <= value <= high
    bounds = clamp_bounds(node)
    return bounds is not None and (bounds[0] > high or bounds[1] < low)
