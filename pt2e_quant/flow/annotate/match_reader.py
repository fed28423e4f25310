"""Decide by rules and tensors which pattern matches are quantized, and why the others are not."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from pt2e_quant.core.errors import module_path
from pt2e_quant.core.provenance import FloatRecord
from pt2e_quant.core.schemes import Role, Scheme, TensorScheme
from pt2e_quant.core.specs import EdgeOrNode
from pt2e_quant.flow.annotate.group_sizes import UndividedError, check_groups
from pt2e_quant.flow.annotate.rules import RuleBook
from pt2e_quant.graph.alias import WrittenPlaces
from pt2e_quant.graph.idioms.attention_masks import MaskInfo
from pt2e_quant.graph.op_table import (
    KEEP_FLOAT_KEY,
    OUT,
    OpRow,
    OpTable,
    Preference,
    Slot,
    operator_name,
)
from pt2e_quant.graph.pattern import Match

LEFT_KEY = "pt2e_quant.left_float"
"""Key of `node.meta`: why a pass before annotation left an operator in a form that has no row."""

_MASK = "it carries an attention mask, whose most negative values would set the range"


@dataclass(frozen=True, slots=True)
class Plan:
    """One accepted match with the scheme of each of its slots."""

    row: OpRow
    match: Match
    schemes: tuple[tuple[Slot, TensorScheme], ...]

    def outputs(self) -> list[Node]:
        """The values that it quantizes."""
        places = (place for slot, _ in self.schemes for place in slot.places(self.match))
        return [place for place in places if isinstance(place, Node)]

    def has_inputs(self, quantized: Collection[Node]) -> bool:
        """True if all that it reads is among these values."""
        sources = [
            place[0]
            for slot, _ in self.schemes
            for place in slot.places(self.match)
            if slot.at != OUT and not isinstance(place, Node)
        ]
        return bool(sources) and all(source in quantized for source in sources)


class MatchReader:
    """Accepts or refuses matches, and keeps the reason for each node that it refuses."""

    def __init__(
        self,
        table: OpTable,
        book: RuleBook,
        masks: MaskInfo,
        written: WrittenPlaces,
        *,
        preferences: Mapping[str, Preference],
        allowed: Collection[str],
    ) -> None:
        self.table = table
        self.book = book
        self.masks = masks.masks | masks.masked_scores
        self.written = written
        self.preferences = preferences
        self.allowed = allowed
        self.reasons: dict[Node, tuple[int, str, str]] = {}
        self.choices: set[Node] = set()
        self.resolved: dict[tuple[int, int], TensorScheme | None] = {}
        self.plans: dict[tuple[str, Node, tuple[Node, ...]], Plan] = {}

    def accept(self, row: OpRow, match: Match) -> bool:
        """True if a match is quantized as this entry of the table; if not, the reason is kept."""
        scheme = self.book.scheme_for(match.covered[0])
        if scheme is None:
            self.refuse(match, f"rule: {self.book.rule_for(match.covered[0], Role.INPUT)}")
            return False
        found: dict[str, tuple[Slot, TensorScheme | None]] = {}
        for slot in row.slots:
            try:
                _check_computed(row, slot, match)
                found[slot.at] = slot, self._scheme_of(slot, match, scheme)
            except ValueError as error:
                if self._is_for_others(slot, match, scheme):
                    return False
                reason = f"{self.table.backend} {row.name}: {error}"
                fix = error.fix if isinstance(error, UndividedError) else ""
                self.refuse(match, reason, len(found), fix)
                return False
        broken = row.refusal(match) or self._preference(row, match)
        if broken is not None:
            reason = f"{self.table.backend} {row.name} needs: {broken.text}"
            self.refuse(match, reason, len(found), broken.fix)
            if isinstance(broken, Preference) and broken.keeps is not None:
                self.choices.update(match.covered)
            return False
        present = {at for at, (_, chosen) in found.items() if chosen is not None}
        schemes = tuple(
            (slot, chosen)
            for slot, chosen in found.values()
            if chosen is not None
            and all(at in present for at in slot.derived_from)
            # Runtimes take an int32 bias as a constant alone.
            and (not slot.derived_from or match.is_constant(slot.at))
        )
        self.plans[row.name, match.anchor, match.covered] = Plan(row, match, schemes)
        return True

    def _is_for_others(self, slot: Slot, match: Match, scheme: Scheme) -> bool:
        """True if the entry is for other schemes, and the table has its own reason for this one."""
        is_told = operator_name(match.anchor) in self.table.reasons and len(match.covered) == 1
        return is_told and not slot.suits(scheme.for_role(slot.role))

    def _preference(self, row: OpRow, match: Match) -> Preference | None:
        """The preference that keeps a match float: the backend's, or one that a pass has set."""
        for name, preference in self.preferences.items():
            if name not in self.allowed and preference.keeps is not None:
                if preference.keeps(row, match):
                    return preference
        kind, name = match.anchor.meta.get(KEEP_FLOAT_KEY, ("", ""))
        return self.preferences.get(name) if kind == row.kind.value else None

    def _scheme_of(self, slot: Slot, match: Match, scheme: Scheme) -> TensorScheme | None:
        places = slot.places(match)
        self._check_places(slot, match, places)
        chosen = self._resolve(slot, scheme) if places else None
        if chosen is not None:
            check_groups(chosen, places)
            for place in places:
                if (reason := self.written.why_not(place)) is not None:
                    source = place if isinstance(place, Node) else place[0]
                    raise ValueError(f'its "{source.name}" {reason}')
        return chosen

    def _resolve(self, slot: Slot, scheme: Scheme) -> TensorScheme | None:
        """`Slot.resolve`, cached; the table and the rule book keep the keys alive."""
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
            if any(size == 0 for size in val.shape if isinstance(size, int)):
                raise ValueError(f'its {slot.role} "{value.name}" has no elements')
            if val.dtype is torch.float64:
                raise ValueError(f'its {slot.role} "{value.name}" is float64, q/dq take float32')

    def refuse(self, match: Match, reason: str, fitting: int = 0, fix: str = "") -> None:
        """Keep a reason and its fix for each node of a match.

        Of several entries that refuse a node, the one with the most fitting tensors gives the
        reason; of equals, the first.
        """
        for node in match.covered:
            if node not in self.reasons or self.reasons[node][0] < fitting:
                self.reasons[node] = fitting, reason, fix

    def leave(self, nodes: Iterable[Node], reason: str) -> None:
        """Keep one reason for nodes, without a match."""
        self.reasons |= {node: (0, reason, "") for node in nodes}

    def record(self, node: Node) -> FloatRecord:
        """Why a node is left float."""
        _, reason, fix = self.reasons.get(node, (0, None, ""))
        if reason is None:
            denied = self.book.scheme_for(node) is None
            reason = (
                f"rule: {self.book.rule_for(node, Role.INPUT)}"
                if denied
                else node.meta.get(LEFT_KEY) or self.table.why_not(node)
            )
        return FloatRecord(
            node=node.name,
            op=operator_name(node),
            module=module_path(node),
            reason=reason,
            size=sum(_constant_bytes(n) for n in node.all_input_nodes),
            fix=fix,
            is_choice=node in self.choices,
        )


def _check_computed(row: OpRow, slot: Slot, match: Match) -> None:
    """Refuse a product of two constants: runtimes fold it into a float constant.

    Raises:
        ValueError: the slot is the input of an operator with a weight, and holds a constant.
    """
    is_product = any(other.role is Role.WEIGHT for other in row.slots)
    if is_product and slot.role is Role.INPUT and match.is_constant(slot.at):
        value = match.values[slot.at]
        name = f'"{value.name}"' if isinstance(value, Node) else value
        raise ValueError(f"its input {name} is a constant")


def _constant_bytes(node: Node) -> int:
    value = node.meta.get("val")
    if node.op != "get_attr" or not isinstance(value, Tensor):
        return 0
    return int(value.numel() * value.element_size())
