"""Op tables: what a backend can run, as data for quantizer, lowering and docs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from torch.fx import Node

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.granularity import PerChannel, PerGroup, PerRow, PerToken
from pt2e_quant.core.schemes import Role, Scheme, TensorScheme
from pt2e_quant.core.specs import EdgeOrNode
from pt2e_quant.graph.ops import LINEAR
from pt2e_quant.graph.pattern import Match, Op, ties

OUT = "out"
"""The slot name of a pattern's own result: the output of its anchor."""

SOURCE_KEY = "pt2e_quant.source_operator"
"""Key of `node.meta`: the operator of the user's graph that a node was made of, for rules."""

KEEP_FLOAT_KEY = "pt2e_quant.keep_float"
"""Key of `node.meta`: (kind, name of the preference) where entries of that kind leave it float."""

ALLOWED_KEY = "pt2e_quant.allowed"
"""Key of `gm.meta`: the names of the preferences that the user overrules."""

SLOWER = "slower"
"""The name of the preference for operators that are no slower than in float."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """Why operators that a backend could run in integers stay float.

    Args:
        name: for `quantizer.allowing(name)`.
        text: what such an operator lacks.
        fix: what to do where it lacks that.
        keeps: whether an entry's match stays float, where that is known of the match alone; else
            a pass before annotation marks the operators (`KEEP_FLOAT_KEY`).
    """

    name: str
    text: str
    fix: str = ""
    keeps: "Callable[[OpRow, Match], bool] | None" = None


class OpKind(StrEnum):
    """The cost of an operator compared to a quantize and a dequantize around it."""

    HEAVY = "heavy"
    """A product: integers pay wherever it stands."""
    LIGHT = "light"
    """Quantized only between others that are; see `backends.target.policy`."""
    MOVES = "moves"
    """Only moves data: quantized where its inputs already are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One tensor of an operator.

    Args:
        at: the pattern's Var or Many name; `OUT`, or an Op's name, for an output.
        role: what the tensor is to the operator.
        accepts: the schemes it can have; none if it must stay float. A per-channel one also says
            the channel axis.
        is_optional: the operator runs as well with this tensor in float.
        fixed: (scale, zero_point) where the range is known beforehand (sigmoid, softmax).
        derived_from: slots whose scales multiply to this one's (an int32 bias).
        narrows: a symmetric scheme loses its least integer here where that alone does not fit.
    """

    at: str
    role: Role
    accepts: tuple[TensorScheme, ...]
    is_optional: bool = False
    fixed: tuple[float, int] | None = None
    derived_from: tuple[str, ...] = ()
    narrows: bool = False

    def resolve(self, scheme: Scheme) -> TensorScheme | None:
        """The tensor scheme this slot gets under a scheme; None leaves it float.

        Raises:
            ValueError: the slot accepts nothing of what the scheme says; the text says why.
        """
        wanted = scheme.for_role(self.role)
        if wanted is None:
            if self.is_optional or not self.accepts:
                return None
            raise ValueError(f'scheme "{scheme.name}" leaves its {self.role} "{self.at}" float')
        for accepted in self.accepts:
            aligned = _with_axis_of(wanted, accepted)
            if self.narrows and aligned.symmetric and aligned.format is None:
                aligned = aligned.narrowed()
            if aligned.fits(accepted):
                return aligned
        if self.is_optional:
            return None
        raise ValueError(f'its {self.role} "{self.at}" takes {self._kinds(wanted)}, not {wanted}')

    def suits(self, wanted: TensorScheme | None) -> bool:
        """True if a scheme, or None for float, is one that this slot accepts."""
        alone = Scheme(name="", input=wanted, output=wanted, weight=wanted, bias=wanted)
        try:
            self.resolve(alone)
        except ValueError:
            return False
        return True

    def unlike(self, scheme: Scheme) -> tuple[bool, ...]:
        """A sort key by the similarity of the nearest accepted scheme to another one."""
        wanted = scheme.for_role(self.role)
        if wanted is None or not self.accepts:
            return (True,)
        return min(_is_unlike(accepted, wanted) for accepted in self.accepts)

    def _kinds(self, wanted: TensorScheme) -> str:
        """The schemes that it accepts, as text; of many only those nearest to the one asked for."""
        if len(self.accepts) <= _MOST_NAMED:
            return " or ".join(str(a) for a in self.accepts) or "float alone"
        alike = sorted(self.accepts, key=lambda a: _is_unlike(a, wanted))[:_MOST_NAMED]
        rest = len(self.accepts) - len(alike)
        return " or ".join([*(str(a) for a in alike), f"{rest} others"])

    def places(self, match: Match) -> list[EdgeOrNode]:
        """The edges or the node of this slot in a match; none for an argument that is not there."""
        if self.role is Role.OUTPUT:
            return [match.anchor if self.at == OUT else match.nodes[self.at]]
        return list(match.edges(self.at))


_MOST_NAMED = 4
"""The most accepted schemes of a slot that a refusal names."""


def _is_unlike(accepted: TensorScheme, wanted: TensorScheme) -> tuple[bool, ...]:
    """A sort key by similarity to another scheme: codes first, then groups, then scales."""
    return (
        accepted.is_dynamic != wanted.is_dynamic,
        accepted.format != wanted.format,
        accepted.dtype != wanted.dtype,
        accepted.granularity != wanted.granularity,
        accepted.scales != wanted.scales,
    )


def _with_axis_of(wanted: TensorScheme, accepted: TensorScheme) -> TensorScheme:
    """A scheme along the axis that the slot's operator needs.

    Channels, and groups of one size, of any axis; per token is also per row of any axis (the
    right side of a matmul has its scales along columns).
    """
    match wanted.granularity, accepted.granularity:
        case (PerChannel(), PerChannel()) | (PerToken(), PerRow()):
            return replace(wanted, granularity=accepted.granularity)
        case PerGroup(size), PerGroup(accepted_size) if size == accepted_size:
            return replace(wanted, granularity=accepted.granularity)
    return wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """A condition that a match must meet for the backend to run it, and its text.

    Args:
        text: what is needed.
        holds: whether a match has it.
        fix: what to do where it has not.
    """

    text: str
    holds: Callable[[Match], bool]
    fix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRow:
    """One operator, or fused group of operators, that a backend runs.

    Args:
        name: of the row, for example "conv2d_relu".
        find: the patterns it is found by; all have the slots' names.
        slots: its tensors.
        share: groups of slots that must have equal qparams.
        constraints: what must hold besides the pattern.
        lowers_to: the backend's own operator.
        kind: what it costs.
        note: for the docs page.
    """

    name: str
    find: tuple[Op, ...]
    slots: tuple[Slot, ...]
    lowers_to: str
    share: tuple[tuple[str, ...], ...] = ()
    constraints: tuple[Constraint, ...] = ()
    kind: OpKind = OpKind.HEAVY
    note: str = ""

    def refusal(self, match: Match) -> Constraint | None:
        """The first constraint that a match breaks."""
        return next((c for c in self.constraints if not c.holds(match)), None)

    def slot(self, at: str) -> Slot:
        """The slot of a name.

        Raises:
            ConfigError: the row has none.
        """
        for slot in self.slots:
            if slot.at == at:
                return slot
        raise ConfigError(f'row "{self.name}" has no slot "{at}"')


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTable:
    """All rows of a backend. Row order never changes what is matched.

    Several rows may have one pattern if no scheme fits more than one of them: static, dynamic
    and weight-only linears are rows of their own.

    Args:
        backend: its name as people write it, for messages: "XNNPACK".
        rows: the operators it runs.
        reasons: operator name (`aten.gelu`) to why it has no row, where that is worth saying.

    Raises:
        ConfigError: two rows of one name, a shared slot that no row has, or two patterns of
            equal width that can match the same nodes under one scheme.
    """

    backend: str
    rows: tuple[OpRow, ...]
    reasons: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [row.name for row in self.rows]
        if len(set(names)) != len(names):
            raise ConfigError(f"{self.backend}: two rows of one name in {sorted(names)}")
        for row in self.rows:
            for at in {name for group in row.share for name in group}:
                row.slot(at)
        found = [pair for pair in ties(self.patterns()) if not _never_both(*pair)]
        if found:
            raise ConfigError(f"{self.backend}: rows of equal width match the same nodes: {found}")

    def patterns(self) -> Sequence[tuple[OpRow, Op]]:
        """Every pattern of every row, for the matcher."""
        return [(row, op) for row in self.rows for op in row.find]

    def row(self, name: str) -> OpRow:
        """The row of a name.

        Raises:
            ConfigError: there is none.
        """
        for row in self.rows:
            if row.name == name:
                return row
        raise ConfigError(f'{self.backend} has no row "{name}"')

    def why_not(self, node: Node) -> str:
        """The reason for a node that no row matches."""
        name = operator_name(node)
        known = self.reasons.get(name)
        return known or f"{self.backend} has no int8 {name.removeprefix('aten.')} here"

    def refusal_of(self, scheme: Scheme) -> str:
        """Why the nearest linear refuses a scheme, and what it takes; "" if one takes it."""
        found: list[tuple[int, tuple[bool, ...], str]] = []
        for row in self.rows:
            if not any(member.target in LINEAR for op in row.find for member in op.members):
                continue
            fitting = 0
            try:
                for slot in row.slots:
                    slot.resolve(scheme)
                    fitting += 1
            except ValueError as error:
                unlike = row.slots[fitting].unlike(scheme)
                found.append((-fitting, unlike, f"{row.name}: {error}"))
            else:
                return ""
        return min(found, default=(0, (), ""))[-1]

    def __iter__(self) -> Iterator[OpRow]:
        return iter(self.rows)


def _never_both(a: OpRow, b: OpRow) -> bool:
    """True if no scheme fits both entries, because a tensor of both has disjoint schemes."""
    theirs = {slot.at: slot for slot in b.slots}
    for slot in a.slots:
        other = theirs.get(slot.at)
        if other is None or slot.is_optional or other.is_optional or slot.role != other.role:
            continue
        if not slot.accepts and not other.accepts:
            continue
        if not any(x.fits(y) or y.fits(x) for x in slot.accepts for y in other.accepts):
            return True
    return False


def operator_name(node: Node) -> str:
    """`aten.conv2d` for a node of aten.conv2d.default."""
    target = node.target
    packet = getattr(target, "overloadpacket", None)
    if packet is not None:
        return str(packet)
    return getattr(target, "__name__", str(target))
