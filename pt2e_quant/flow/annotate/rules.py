"""Rules: what a user wants quantized, by module, type, operator or node, and per role.

The more specific kind wins (node > module name > module type > operator > global); among rules
of one kind the later one wins.
"""

import fnmatch
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from torch.fx import Node

from pt2e_quant.core.errors import AnnotationError, ConfigError, near
from pt2e_quant.core.schemes import Role, Scheme
from pt2e_quant.flow.annotate.observer_choice import ObserverChoice
from pt2e_quant.graph.meta import origin_name
from pt2e_quant.graph.op_table import SOURCE_KEY, operator_name

ALL_ROLES = frozenset(Role)


class RuleKind(IntEnum):
    """The property that a rule selects by; a higher value is more specific and wins."""

    GLOBAL = 0
    OPERATOR = 1
    MODULE_TYPE = 2
    MODULE_NAME = 3
    NODE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantRule:
    """One rule.

    Args:
        kind: what it selects by.
        pattern: a glob, or a regular expression after "re:"; "" for a global rule. A module
            name also selects everything inside that module.
        scheme: what the selected nodes get; None leaves them float.
        roles: the tensors of the operator it speaks about.
        where: what must hold of a node besides; None for nothing.
        observers: what finds the ranges of the selected nodes; None for the quantizer's.
        algorithms: the names of those that are applied at the selected nodes, by the rule of their
            weight; None for all of the quantizer that no rule brought.

    Raises:
        ConfigError: the regular expression is malformed.
    """

    kind: RuleKind
    pattern: str = ""
    scheme: Scheme | None
    roles: frozenset[Role] = ALL_ROLES
    where: Callable[[Node], bool] | None = None
    observers: ObserverChoice | None = None
    algorithms: frozenset[str] | None = None

    def __post_init__(self) -> None:
        if self.scheme is not None and not isinstance(self.scheme, Scheme):
            raise ConfigError(
                f"a rule's scheme is a Scheme, or None for float, found {self.scheme!r}",
                fix="quantizer.scheme for the recipe's own",
            )
        if self.pattern.startswith("re:"):
            try:
                re.compile(self.pattern[3:])
            except re.error as error:
                raise ConfigError(f'bad regular expression "{self.pattern[3:]}": {error}') from None

    def matcher(self) -> Callable[[str], bool]:
        """A function that says whether a name matches."""
        if self.pattern.startswith("re:"):
            compiled = re.compile(self.pattern[3:])
            return lambda name: compiled.fullmatch(name) is not None
        return re.compile(fnmatch.translate(self.pattern)).match  # type: ignore[return-value]  # a Match is true

    def __str__(self) -> str:
        what = self.scheme.name if self.scheme is not None else "float"
        roles = "" if self.roles == ALL_ROLES else f" {'/'.join(sorted(self.roles))}"
        name = "global" if self.kind is RuleKind.GLOBAL else self.kind.name.lower()
        pattern = f' "{self.pattern}"' if self.pattern else ""
        where = f" {self.where.__name__}" if self.where is not None else ""
        return f"{name}{pattern}{where}{roles} -> {what}"


def module_scopes(node: Node) -> list[tuple[str, str]]:
    """(path, type name) of every module a node was traced in, outermost first."""
    stack = node.meta.get("nn_module_stack") or {}
    found = []
    for path, kind in stack.values():
        name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
        found.append((str(path), name))
    return found


class RuleBook:
    """The rules of one quantizer, matched against nodes; remembers which ones matched.

    Args:
        rules: in the order given by the user.
    """

    def __init__(self, rules: Sequence[QuantRule]) -> None:
        indexed = list(enumerate(rules))
        # Most specific first, then the latest: the first that speaks about a role decides.
        indexed.sort(key=lambda pair: (pair[1].kind, pair[0]), reverse=True)
        self.rules = [(rule, rule.matcher()) for _, rule in indexed]
        # By the places of rules, not by the rules, whose hash would be computed for every node.
        self._selected: dict[Node, tuple[int, ...]] = {}
        self._schemes: dict[tuple[int, ...], Scheme | None] = {}

    def rule_for(self, node: Node, role: Role) -> QuantRule | None:
        """The rule that decides about one role of a node."""
        for place in self._selecting(node):
            rule = self.rules[place][0]
            if role in rule.roles:
                return rule
        return None

    def scheme_for(self, node: Node) -> Scheme | None:
        """The scheme of a node, role by role; None if every role stays float."""
        selected = self._selecting(node)
        if selected not in self._schemes:
            self._schemes[selected] = self._combined(node)
        return self._schemes[selected]

    def _combined(self, node: Node) -> Scheme | None:
        schemes = {
            role: rule.scheme if (rule := self.rule_for(node, role)) else None for role in Role
        }
        named = dict.fromkeys(s.name for s in schemes.values() if s is not None)
        if not named:
            return None
        parts = {role: s.for_role(role) if s else None for role, s in schemes.items()}
        return Scheme(
            name="+".join(named),
            input=parts[Role.INPUT],
            output=parts[Role.OUTPUT],
            weight=parts[Role.WEIGHT],
            bias=parts[Role.BIAS],
        )

    def _selecting(self, node: Node) -> tuple[int, ...]:
        """The indices of the rules that select a node, the deciding one first."""
        found = self._selected.get(node)
        if found is None:
            found = tuple(
                place
                for place, (rule, matches) in enumerate(self.rules)
                if _selects(rule, matches, node)
            )
            self._selected[node] = found
        return found

    def check_all_matched(self, nodes: Sequence[Node]) -> None:
        """Refuse rules that select none of the nodes.

        Raises:
            AnnotationError: a rule selects nothing; near names are offered.
        """
        for rule, matches in self.rules:
            if rule.kind is RuleKind.GLOBAL:
                continue
            known = _names(rule.kind, nodes)
            if not any(matches(name) for name in known):
                raise AnnotationError(
                    f"no {rule.kind.name.lower().replace('_', ' ')} in the graph matches "
                    f'"{rule.pattern}": {near(rule.pattern, known)}',
                    rule=str(rule),
                    fix="correct the name, or remove the rule",
                )


def _ancestors(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts) + 1)]


def _type_names(name: str) -> tuple[str, str]:
    return name, name.rsplit(".", 1)[-1]


def _op_names(node: Node) -> tuple[str, ...]:
    full = operator_name(node)
    names = full, full.removeprefix("aten."), str(node.target)
    source = node.meta.get(SOURCE_KEY)
    return names if source is None else (*names, source, source.removeprefix("aten."))


def _selects(rule: QuantRule, matches: Callable[[str], bool], node: Node) -> bool:
    if rule.where is not None and not rule.where(node):
        return False
    if rule.kind is RuleKind.GLOBAL:
        return True
    if rule.kind is RuleKind.NODE:
        return bool(matches(node.name)) or (
            bool(matches(origin_name(node))) and not _is_node(rule.pattern, node)
        )
    if rule.kind is RuleKind.OPERATOR:
        return any(matches(name) for name in _op_names(node))
    scopes = module_scopes(node)
    if rule.kind is RuleKind.MODULE_TYPE:
        return any(matches(name) for _, kind in scopes for name in _type_names(kind))
    paths = {a for path, _ in scopes for a in _ancestors(path)}
    return any(matches(path) for path in paths)


def _is_node(name: str, node: Node) -> bool:
    """Whether another node has a name: then that one is meant, and not what was exported so."""
    return any(other.name == name for other in node.graph.nodes)


def _names(kind: RuleKind, nodes: Sequence[Node]) -> set[str]:
    if kind is RuleKind.NODE:
        return {name for node in nodes for name in (node.name, origin_name(node))}
    if kind is RuleKind.OPERATOR:
        return {name for node in nodes for name in _op_names(node)}
    scopes = [scope for node in nodes for scope in module_scopes(node)]
    if kind is RuleKind.MODULE_TYPE:
        return {name for _, full in scopes for name in _type_names(full)}
    return {a for path, _ in scopes for a in _ancestors(path)}
