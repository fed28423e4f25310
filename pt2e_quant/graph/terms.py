"""The parts of patterns: `Var`, `Many`, `Lit`, `Op`, and functions that build chains.

Matching them is in `pattern.py`, which hands these names on.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from torch.fx import Node

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.graph.ops import Overload, Overloads, Target

Where: TypeAlias = Callable[[Node], bool]


@dataclass(frozen=True, slots=True)
class Var:
    """Any value: a node or a literal. The same name twice must be the same value."""

    name: str
    where: Callable[[Any], bool] | None = None


@dataclass(frozen=True, slots=True)
class Many:
    """A list or tuple whose items are all nodes."""

    name: str


@dataclass(frozen=True, slots=True)
class Lit:
    """A literal equal to this one (6 and 6.0 are equal)."""

    value: object


@dataclass(frozen=True, slots=True, init=False)
class Op:
    """A call of one of several equal overloads, with patterns for its leading arguments.

    Args:
        target: an overload, an `Overload`, or a tuple of these.
        args: patterns for the arguments in schema order; arguments not listed are free.
        name: the name under which the match hands out the node.
        users: how many nodes may read the result inside a pattern, None for any number. The
            anchor, the outermost operator, may always have any number.
        where: a condition on the node.
        through: single-user operators that may stand between this one and its reader, which
            must pass this one's result on as their first argument.
    """

    targets: Overloads
    args: tuple["Pattern", ...]
    name: str
    users: int | None
    where: Where | None
    through: Overloads
    members: tuple[Overload, ...]

    def __init__(
        self,
        target: Target | Overload | Overloads,
        *args: "Pattern",
        name: str = "",
        users: int | None = 1,
        where: Where | None = None,
        through: Overloads = (),
    ) -> None:
        overloads = target if isinstance(target, tuple) else (target,)
        for field, value in (
            ("targets", overloads),
            ("args", args),
            ("name", name),
            ("users", users),
            ("where", where),
            ("through", through),
            ("members", tuple(m if isinstance(m, Overload) else Overload(m) for m in overloads)),
        ):
            object.__setattr__(self, field, value)

    def overload_of(self, call: Node) -> Overload | None:
        """The overload that a node calls, the one with most fixed arguments."""
        best: Overload | None = None
        for member in self.members:
            if call.target is member.target and member.accepts(call):
                if best is None or len(member.fixed) > len(best.fixed):
                    best = member
        return best

    def ops(self) -> Iterator["Op"]:
        """This operator and those in its arguments, outermost first."""
        yield self
        for argument in self.args:
            if isinstance(argument, Op):
                yield from argument.ops()

    @property
    def width(self) -> int:
        """The number of operators that the pattern covers."""
        return sum(1 for _ in self.ops())

    @property
    def conditions(self) -> int:
        """The number of conditions it sets beyond the operators: literals, predicates."""
        found = 0
        for op in self.ops():
            found += op.where is not None
            for argument in op.args:
                found += isinstance(argument, Lit)
                found += isinstance(argument, Var) and argument.where is not None
        return found


Pattern: TypeAlias = Var | Many | Lit | Op


@dataclass(frozen=True, slots=True)
class Step:
    """An operator that takes the previous one's result as its first argument."""

    overloads: Overloads
    name: str
    rest: tuple[Pattern, ...]
    optional: bool = False


def step(overloads: Overloads, name: str = "", *rest: Pattern) -> Step:
    """An operator in a chain; `rest` are the patterns of its further arguments."""
    return Step(overloads, name, rest)


def maybe(what: Step | Overloads, name: str = "") -> Step:
    """An operator in a chain that may be absent."""
    made = what if isinstance(what, Step) else step(what, name)
    return replace(made, optional=True)


def one_of(*operators: Overloads) -> Overloads:
    """All the given overloads, as one operator's."""
    return tuple(member for overloads in operators for member in overloads)


def chain(first: Op | tuple[Op, ...], *steps: Step | Overloads) -> tuple[Op, ...]:
    """The patterns of an operator followed by others, one for each choice of optional steps.

    The widest comes first, though order never matters to the matcher.
    """
    found = (first,) if isinstance(first, Op) else first
    for given in steps:
        made = given if isinstance(given, Step) else step(given)
        longer = tuple(Op(made.overloads, op, *made.rest, name=made.name) for op in found)
        found = longer + found if made.optional else longer
    return found


def either_order(
    target: Target | Overloads, a: Pattern, b: Pattern, *rest: Pattern, name: str = ""
) -> tuple[Op, Op]:
    """The two patterns of a commutative operator."""
    return Op(target, a, b, *rest, name=name), Op(target, b, a, *rest, name=name)


def check_names(op: Op) -> None:
    """Refuse a pattern that names two operators alike, or an operator like a value.

    Raises:
        ConfigError: the name is given twice.
    """
    names: set[str] = set()
    values = {a.name for o in op.ops() for a in o.args if isinstance(a, (Var, Many))}
    for part in op.ops():
        if part.name and part.name in names | values:
            raise ConfigError(f'the pattern gives the name "{part.name}" twice')
        names.add(part.name)
