"""The quantizer made from a backend's op table: one loop over matches writes the annotations."""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule, Node

from pt2e_quant.core.errors import AnnotationError, module_path
from pt2e_quant.core.provenance import FloatRecord, provenance_of
from pt2e_quant.core.schemes import Role, Scheme, TensorScheme
from pt2e_quant.core.specs import (
    Q_ANNOTATION_KEY,
    EdgeOrNode,
    QuantizationAnnotation,
    QuantizationSpecBase,
    SharedQuantizationSpec,
)
from pt2e_quant.flow.group_sizes import check_groups, group_size_of
from pt2e_quant.flow.observer_choice import ObserverChoice, derived_spec
from pt2e_quant.flow.quantizer import Quantizer
from pt2e_quant.flow.rules import ALL_ROLES, QuantRule, RuleBook, RuleKind
from pt2e_quant.flow.train_ranges import for_training
from pt2e_quant.graph.masks import MaskInfo, find_masks
from pt2e_quant.graph.op_table import OUT, OpRow, OpTable, Slot, operator_name
from pt2e_quant.graph.pattern import Match, Op, find_matches
from pt2e_quant.graph.pipeline import GraphPass, log_passes, run_passes
from pt2e_quant.graph.subgraphs import BODY_KEY, bodies
from pt2e_quant.passes.balance_channels import balance_channels
from pt2e_quant.passes.pad_linears import pad_linears

__all__ = ["MASKS_KEY", "RULE_KEY", "TableQuantizer"]

RULE_KEY = "pt2e_quant.rule"
"""The key of `node.meta` that says which rule asked for a node's annotation."""

MASKS_KEY = "pt2e_quant.masks"
"""The key of `gm.meta` under which annotate leaves the masks it found, for prepare to take."""

_MASK = "it carries an attention mask, whose most negative values would set the range"


@dataclass(frozen=True, slots=True)
class _Plan:
    """One accepted match with the scheme of each of its slots."""

    row: OpRow
    match: Match
    schemes: tuple[tuple[Slot, TensorScheme], ...]


class TableQuantizer(Quantizer):
    """Annotates what an op table can run, where the rules ask for it.

    Args:
        table: what the backend runs.
        scheme: what every node gets unless a rule says otherwise.
        observers: which observers are used.
        rules: further rules, as the `set_…` methods add them.
        transforms: passes that `transform_for_annotation` runs.
        algorithms: passes that convert runs on the calibrated graph, before q/dq are made.
        finishing: passes that convert runs on the q/dq graph.
        balances_channels: divide inputs of linears by a factor per channel and multiply their
            weights where that lowers the rounding error expected of weights and of inputs rounded
            at run time (`balance_channels`); exact in float. May also be set afterwards.
    """

    def __init__(
        self,
        table: OpTable,
        scheme: Scheme | None,
        *,
        observers: ObserverChoice | None = None,
        rules: Sequence[QuantRule] = (),
        transforms: Sequence[GraphPass] = (),
        algorithms: Sequence[GraphPass] = (),
        finishing: Sequence[GraphPass] = (),
        balances_channels: bool = False,
    ) -> None:
        self.table = table
        self.scheme = scheme
        self.observers = observers or ObserverChoice()
        self.rules = [QuantRule(kind=RuleKind.GLOBAL, scheme=scheme), *rules]
        self.transforms = tuple(transforms)
        self.algorithms = tuple(algorithms)
        self.finishing = tuple(finishing)
        self.balances_channels = balances_channels
        self.pads_groups = False

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

    def pad_groups(self) -> "TableQuantizer":
        """Pad linears with zero columns where a scheme's groups do not divide their weights."""
        self.pads_groups = True
        return self

    def for_qat(self) -> "TableQuantizer":
        """The same for training: fake-quantizes; what algorithms would choose is learned."""
        made = copy.copy(self)
        made.rules = list(self.rules)
        made.observers = for_training(self.observers)
        made.algorithms = made.finishing = ()
        made.balances_channels = False  # training starts from the weights that the user gave
        return made

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        """Run the table's own passes."""
        if self.balances_channels:
            records = run_passes(model, (balance_channels(RuleBook(self.rules).scheme_for),))
            log_passes(provenance_of(model), records)
        run_passes(model, self.transforms)
        if self.pads_groups:
            book = RuleBook(self.rules)
            run_passes(model, (pad_linears(lambda node: group_size_of(book.scheme_for(node))),))
        return model

    def annotate(self, model: GraphModule) -> GraphModule:
        """Write an annotation on every node that a row takes and a rule asks for.

        Raises:
            AnnotationError: a rule selects nothing in this graph, or the groups of a scheme do
                not divide a weight.
        """
        nodes = [n for n in model.graph.nodes if _computes_float(n)]
        book = RuleBook(self.rules)
        if BODY_KEY not in model.meta:
            inner = (n for body in bodies(model) for n in body.gm.graph.nodes)
            book.check_all_matched([*nodes, *(n for n in inner if _computes_float(n))])
        masks = find_masks(model)
        model.meta[MASKS_KEY] = masks
        reader = _Reader(self.table, book, masks)
        matches = find_matches(model.graph, self._patterns(), reader.accept)
        done: set[Node] = set()
        quantized: set[Node] = set()
        for row, match in matches:
            plan = reader.plans[row.name, match.anchor, match.covered]
            if row.is_passive and not _inputs_quantized(plan, quantized):
                reader.refuse(match, "it only moves data, and its input is float")
                continue
            self._write(plan, book)
            done.update(match.covered)
            quantized.update(_outputs(plan))
        provenance = provenance_of(model)
        provenance.quantizer = f"{self.table.backend} table"
        provenance.set_floats([reader.record(n) for n in nodes if n not in done])
        return model

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
            if all(any(_takes(s, offer) for offer in offered[s.role]) for s in row.slots)
        }
        patterns = self.table.patterns()
        served = {m.target for row, op in patterns if row.name in suited for m in op.members}
        return [
            (row, op)
            for row, op in patterns
            if row.name in suited or not any(m.target in served for m in op.members)
        ]

    def _write(self, plan: _Plan, book: RuleBook) -> None:
        for node in plan.match.covered:
            node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(_annotated=True)
        first = plan.match.covered[0]
        specs = self._specs(plan)
        for place, (spec, role) in specs.items():
            node = place if isinstance(place, Node) else place[1]
            annotation: QuantizationAnnotation = node.meta[Q_ANNOTATION_KEY]
            if isinstance(place, Node):
                annotation.output_qspec = spec
            else:
                annotation.input_qspec_map[place[0]] = spec
            node.meta[RULE_KEY] = f"{book.rule_for(first, role)} (row {plan.row.name})"

    def _specs(self, plan: _Plan) -> dict[EdgeOrNode, tuple[QuantizationSpecBase, Role]]:
        slots = {slot.at: slot for slot, _ in plan.schemes}
        found: dict[EdgeOrNode, tuple[QuantizationSpecBase, Role]] = {}
        for slot, scheme in plan.schemes:
            places = slot.places(plan.match)
            if slot.derived_from:
                sources = [slots[at].places(plan.match)[0] for at in slot.derived_from]
                found |= {p: (derived_spec(scheme, sources), slot.role) for p in places}
                continue
            spec = self.observers.spec(plan.row, slot, scheme)
            found |= {p: (spec, slot.role) for p in places}
        for group in plan.row.share:
            places = [p for at in group if at in slots for p in slots[at].places(plan.match)]
            for place in places[1:]:
                if place != places[0]:
                    found[place] = (SharedQuantizationSpec(places[0]), found[place][1])
        return found

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


class _Reader:
    """Decides about matches, and remembers the reason for each node it turns down."""

    def __init__(self, table: OpTable, book: RuleBook, masks: MaskInfo) -> None:
        self.table = table
        self.book = book
        self.masks = masks.masks | masks.masked_scores
        self.reasons: dict[Node, tuple[int, str]] = {}
        self.resolved: dict[tuple[int, int], TensorScheme | None] = {}
        self.plans: dict[tuple[str, Node, tuple[Node, ...]], _Plan] = {}

    def accept(self, row: OpRow, match: Match) -> bool:
        """Whether the row runs the match under the rules; the reason is kept if not."""
        scheme = self.book.scheme_for(match.covered[0])
        if scheme is None:
            self.refuse(match, f"rule: {self.book.rule_for(match.covered[0], Role.INPUT)}")
            return False
        found: dict[str, tuple[Slot, TensorScheme | None]] = {}
        for slot in row.slots:
            try:
                found[slot.at] = slot, self._scheme_of(slot, match, scheme)
            except ValueError as error:
                self.refuse(match, f"{self.table.backend} {row.name}: {error}", len(found))
                return False
        if (broken := row.refusal(match)) is not None:
            reason = f"{self.table.backend} {row.name} needs: {broken.text}"
            self.refuse(match, reason, len(found))
            return False
        present = {at for at, (_, chosen) in found.items() if chosen is not None}
        schemes = tuple(
            (slot, chosen)
            for slot, chosen in found.values()
            if chosen is not None and all(at in present for at in slot.derived_from)
        )
        self.plans[row.name, match.anchor, match.covered] = _Plan(row, match, schemes)
        return True

    def _scheme_of(self, slot: Slot, match: Match, scheme: Scheme) -> TensorScheme | None:
        places = slot.places(match)
        self._check_places(slot, match, places)
        chosen = self._resolve(slot, scheme) if places else None
        if chosen is not None:
            check_groups(chosen, places)
        return chosen

    def _resolve(self, slot: Slot, scheme: Scheme) -> TensorScheme | None:
        """`Slot.resolve`, once for each slot and scheme: the table and the book hold both."""
        key = id(slot), id(scheme)
        if key not in self.resolved:
            self.resolved[key] = slot.resolve(scheme)
        return self.resolved[key]

    def _check_places(self, slot: Slot, match: Match, places: Sequence[EdgeOrNode]) -> None:
        values = [p if isinstance(p, Node) else p[0] for p in places]
        if any(v in self.masks for v in values):
            raise ValueError(_MASK)
        if slot.role is Role.WEIGHT and not match.is_constant(slot.at):
            raise ValueError(f'its weight "{slot.at}" is computed at run time')
        for value in values:
            val = value.meta.get("val")
            if isinstance(val, (tuple, list)) and slot.role is Role.OUTPUT:
                continue
            if not isinstance(val, Tensor) or not val.is_floating_point():
                raise ValueError(f'its {slot.role} "{value.name}" is no floating-point tensor')

    def refuse(self, match: Match, reason: str, fitting: int = 0) -> None:
        """Keep a reason for every node of a match: that of the row with most fitting tensors.

        Among rows with equally many the first one stays.
        """
        for node in match.covered:
            if node not in self.reasons or self.reasons[node][0] < fitting:
                self.reasons[node] = fitting, reason

    def record(self, node: Node) -> FloatRecord:
        """Why a node is left float."""
        _, reason = self.reasons.get(node, (0, None))
        if reason is None:
            denied = self.book.scheme_for(node) is None
            reason = (
                f"rule: {self.book.rule_for(node, Role.INPUT)}"
                if denied
                else self.table.why_not(node)
            )
        return FloatRecord(
            node=node.name,
            op=operator_name(node),
            module=module_path(node),
            reason=reason,
            size=sum(_constant_bytes(n) for n in node.all_input_nodes),
        )


def _takes(slot: Slot, wanted: TensorScheme | None) -> bool:
    alone = Scheme(name="", input=wanted, output=wanted, weight=wanted, bias=wanted)
    try:
        slot.resolve(alone)
    except ValueError:
        return False
    return True


def _outputs(plan: _Plan) -> list[Node]:
    places = (place for slot, _ in plan.schemes for place in slot.places(plan.match))
    return [place for place in places if isinstance(place, Node)]


def _inputs_quantized(plan: _Plan, quantized: set[Node]) -> bool:
    sources = [
        place[0]
        for slot, _ in plan.schemes
        for place in slot.places(plan.match)
        if slot.at != OUT and not isinstance(place, Node)
    ]
    return bool(sources) and all(source in quantized for source in sources)


def _computes_float(node: Node) -> bool:
    if node.op != "call_function":
        return False
    value = node.meta.get("val")
    first = value[0] if isinstance(value, (tuple, list)) and value else value
    return isinstance(first, Tensor) and first.is_floating_point()


def _constant_bytes(node: Node) -> int:
    value = node.meta.get("val")
    if node.op != "get_attr" or not isinstance(value, Tensor):
        return 0
    return int(value.numel() * value.element_size())
