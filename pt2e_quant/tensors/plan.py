"""The plan for a module's weights and their schemes: the graph flow's rules, read for modules."""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from pt2e_quant.backends.target.recipe import unaliased
from pt2e_quant.core.arguments import check_filter, check_initialized, check_module, check_type
from pt2e_quant.core.errors import ConfigError, near
from pt2e_quant.core.granularity import PerChannel
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.core.schemes import INT8_ACTIVATION, INT8_WEIGHT, Role, Scheme
from pt2e_quant.flow.annotate.rules import QuantRule, RuleKind
from pt2e_quant.tensors.quantized_tensor import QuantizedTensor
from pt2e_quant.tensors.report import Row

Filter = Callable[[nn.Module, str], bool]
INT8_STATIC = Scheme(name="int8", input=INT8_ACTIVATION, output=INT8_ACTIVATION, weight=INT8_WEIGHT)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
KINDS = (nn.Linear, nn.Embedding, *CONVOLUTIONS, *TRANSPOSED)
"""Modules of torch whose functions take quantized weights."""


def holds_transposed(module: nn.Module) -> bool:
    """True for a linear that holds its weight as [in, out]: `Conv1D` of transformers, as in GPT-2.

    It multiplies by `torch.addmm`. A model with one has imported its class. A class of ours that
    takes its place says so by `weight_is_transposed`.
    """
    if getattr(type(module), "weight_is_transposed", False):
        return True
    found = sys.modules.get("transformers.pytorch_utils")
    return found is not None and isinstance(module, found.Conv1D)


def upright(module: nn.Module) -> Tensor:
    """The weight of a linear as [out, in], whichever way the module holds it."""
    weight: Tensor = module.weight  # type: ignore[assignment]  # every linear has one
    return weight.t() if holds_transposed(module) else weight


def is_known(module: nn.Module) -> bool:
    """True if a module's function takes a quantized weight."""
    return isinstance(module, KINDS) or holds_transposed(module)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One weight that is to be quantized.

    Args:
        path: of the module.
        module: it.
        scheme: how, by role.
    """

    path: str
    module: nn.Module
    scheme: Scheme

    @property
    def name(self) -> str:
        """The weight's name in the state dict."""
        return f"{self.path}.weight" if self.path else "weight"

    @property
    def weight(self) -> Tensor:
        """The weight."""
        found: Tensor = self.module.weight  # type: ignore[assignment]  # every kind has one
        return found


def as_scheme(scheme: str | Scheme) -> Scheme:
    """A scheme, or the one of a name: those of `scheme_named`, of recipes' aliases, and "int8".

    Raises:
        ConfigError: there is none of that name, or it leaves weights float.

    >>> as_scheme("int8_weight_only").name
    'w8'
    """
    if isinstance(scheme, str):
        name = unaliased(scheme)
        found = INT8_STATIC if name == "int8" else scheme_named(name)
    else:
        found = scheme
    if not isinstance(found, Scheme) or found.weight is None:
        raise ConfigError(
            f"quantize_ takes a scheme with weights, or its name, found {scheme!r}",
            fix='quantize_(module, "w8")',
        )
    return found


def is_linear(module: nn.Module, path: str) -> bool:
    """The filter there is by default."""
    return isinstance(module, nn.Linear) or holds_transposed(module)


def places_of(
    root: nn.Module,
    scheme: Scheme | None,
    filter: Filter | None = None,
    rules: Sequence[QuantRule] = (),
) -> list[Place]:
    """The weights that are to be quantized, in the order of modules.

    Args:
        root: the module.
        scheme: what the modules that `filter` takes get; None leaves them float.
        filter: of (module, path); linears by default.
        rules: more specific ones win, as in the graph flow; of modules they alone speak about,
            the filter is not asked.

    Raises:
        ConfigError: a rule matches no module, or speaks of operators or nodes, which only a graph
            has; an argument is of another kind.
    """
    check_module("module", root)
    check_initialized(root)
    check_filter(filter)
    _check_rules(rules)
    chosen = filter or is_linear
    book = _Book(root, rules)
    found = []
    for path, module in root.named_modules():
        if not is_known(module):
            continue
        rule = book.rule_for(path)
        wanted = rule.scheme if rule is not None else scheme if chosen(module, path) else None
        if wanted is not None:
            found.append(Place(path=path, module=module, scheme=aligned(wanted, module)))
    return found


def floats_beside(root: nn.Module, names: Iterable[str]) -> list[Row]:
    """Rows of the float parameters with two axes or more that nothing asked for.

    Args:
        root: the module, quantized.
        names: of the weights that have a row.

    Returns:
        One row for each, with the reason; tied ones by their first name.
    """
    asked = set(names)
    named = dict(root.named_parameters(remove_duplicate=False))
    done = {id(named[name]) for name in asked if name in named}
    rows = []
    for name, value in named.items():
        if isinstance(value, QuantizedTensor) or id(value) in done:
            continue
        if value.dim() < 2 or not value.is_floating_point():
            continue
        done.add(id(value))
        path, _, leaf = name.rpartition(".")
        owner = root.get_submodule(path)
        kind = type(owner).__name__
        if leaf == "weight" and is_known(owner):
            reason = f"{kind}: a rule or the filter leaves it out; the default filter takes linears"
        else:
            reason = f"{kind}.{leaf}: what {kind} computes is not known; try its graph"
        size = value.numel() * value.element_size()
        rows.append(Row(name=name, bytes_before=size, bytes_after=size, reason=reason))
    return rows


def aligned(scheme: Scheme, module: nn.Module) -> Scheme:
    """A scheme as a module takes it: channels of a transposed convolution's weight are axis 1.

    An embedding reads rows, whose places are no activations.
    """
    if isinstance(module, nn.Embedding):
        return replace(scheme, input=None, output=None)
    weight = scheme.weight
    by_channel = weight is not None and isinstance(weight.granularity, PerChannel)
    if isinstance(module, TRANSPOSED) and module.groups == 1 and by_channel:
        assert weight is not None
        return replace(scheme, weight=replace(weight, granularity=PerChannel(1)))
    return scheme


def why_not(place: Place) -> str:
    """Return the reason why a weight cannot be quantized, "" if it can."""
    if isinstance(place.weight, QuantizedTensor):
        return f"it is {place.weight.form.scheme} already"
    if not place.weight.is_floating_point():
        return f"it holds {place.weight.dtype}"
    is_parametrized = torch.nn.utils.parametrize.is_parametrized(place.module)
    if is_parametrized or "weight" not in place.module._parameters:
        return "it is computed from other parameters"
    return ""


def _check_rules(rules: object) -> None:
    fix = "rules=[rule], of pq.QuantRule"
    check_type("rules", rules, (list, tuple), "a list of rules", fix=fix)
    assert isinstance(rules, (list, tuple))
    for i, rule in enumerate(rules):
        check_type(f"rules[{i}]", rule, QuantRule, "a rule", fix=fix)


class _Book:
    """Rules matched against modules' paths and classes."""

    def __init__(self, root: nn.Module, rules: Sequence[QuantRule]) -> None:
        self.kinds = {path: type(module) for path, module in root.named_modules()}
        indexed = sorted(enumerate(rules), key=lambda pair: (pair[1].kind, pair[0]), reverse=True)
        self.rules = [(rule, rule.matcher()) for _, rule in indexed]
        for rule, matches in self.rules:
            self._check(rule, matches)

    def rule_for(self, path: str) -> QuantRule | None:
        """The rule that decides about a module's weight."""
        for rule, matches in self.rules:
            if Role.WEIGHT in rule.roles and self._selects(rule, matches, path):
                return rule
        return None

    def _selects(self, rule: QuantRule, matches: Callable[[str], bool], path: str) -> bool:
        if rule.kind is RuleKind.GLOBAL:
            return True
        enclosing = _enclosing(path)
        if rule.kind is RuleKind.MODULE_NAME:
            return any(matches(name) for name in enclosing)
        return any(matches(name) for p in enclosing for name in _names_of(self.kinds[p]))

    def _check(self, rule: QuantRule, matches: Callable[[str], bool]) -> None:
        if rule.kind in (RuleKind.OPERATOR, RuleKind.NODE) or rule.where is not None:
            raise ConfigError(
                f"rule {rule} speaks of operators, which a module has none of",
                fix="name modules or their classes, or quantize the exported graph",
            )
        by_name = rule.kind is RuleKind.MODULE_NAME
        known: Iterable[str] = (
            self.kinds if by_name else (n for kind in self.kinds.values() for n in _names_of(kind))
        )
        known = list(known)
        if rule.kind is not RuleKind.GLOBAL and not any(matches(name) for name in known):
            raise ConfigError(
                f'no module matches "{rule.pattern}": {near(rule.pattern, known)}',
                rule=str(rule),
                fix="correct the name, or remove the rule",
            )


def _enclosing(path: str) -> list[str]:
    parts = path.split(".") if path else []
    return ["", *(".".join(parts[:i]) for i in range(1, len(parts) + 1))]


def _names_of(kind: type[nn.Module]) -> tuple[str, str]:
    return f"{kind.__module__}.{kind.__qualname__}", kind.__qualname__
