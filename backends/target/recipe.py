"""Recipes: names for schemes with observers, algorithms and passes."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from pt2e_quant.core.errors import ConfigError, near
from pt2e_quant.core.formats.number_formats import NumberFormat
from pt2e_quant.core.granularity import PerGroup
from pt2e_quant.core.scheme_names import activations_first, scheme_named
from pt2e_quant.core.schemes import Scheme, TensorScheme
from pt2e_quant.flow.annotate.observer_choice import ObserverChoice
from pt2e_quant.flow.annotate.rules import QuantRule, RuleKind
from pt2e_quant.graph.op_table import OpTable
from pt2e_quant.graph.pipeline import GraphPass
from pt2e_quant.graph.tied_tables import is_tied_linear
from pt2e_quant.observers.weights.weight_search import WeightSearch
from pt2e_quant.passes.algorithms.algorithm import Algorithm
from pt2e_quant.passes.algorithms.balance_channels import BalanceChannels
from pt2e_quant.passes.algorithms.bias_correction import LEAST_SAMPLES, BiasCorrection
from pt2e_quant.passes.algorithms.block_gptq import BlockGptq
from pt2e_quant.passes.algorithms.choose_ranges import ChooseRanges
from pt2e_quant.passes.algorithms.keep_float import KeepFloat
from pt2e_quant.passes.algorithms.pair_sums import PairCodes, PairScales
from pt2e_quant.passes.algorithms.saturation_limits import SaturationLimits

FIT_PAIRS = (PairScales(), PairCodes())
"""Sums of 8-bit products are exact on CPUs without VNNI too."""

WEIGHTS_BY_DATA = (
    BlockGptq(any_observer=False),
    BiasCorrection(least_samples=LEAST_SAMPLES, any_observer=False),
)
"""The default choice of integers of weights and biases in static recipes."""

CHOICES_BY_DATA = (
    SaturationLimits(any_observer=False),
    ChooseRanges(any_observer=False),
    KeepFloat(any_observer=False),
    *WEIGHTS_BY_DATA,
)
"""The same with ranges of activations of 8 bits."""

ALIASES: Mapping[str, str] = {
    "static": "int8",
    "w8a8": "int8",
    "a8w8": "int8",
    "dynamic": "int8_dynamic",
    "int8_dynamic_activation_int8_weight": "int8_dynamic",
    "int8_weight_only": "w8",
    "weight_only": "w8",
    "int4": "w4",
    "int4_weight_only": "w4",
    "8da4w": "a8w4_g32",
    "int8_dynamic_activation_int4_weight": "a8w4_g32",
}
"""Names of torchao's configurations and of other projects, with the names used here."""


def unaliased(recipe: str) -> str:
    """The name used here for a recipe of another project; any other name unchanged.

    >>> unaliased("int4"), unaliased("w4a8")
    ('w4', 'a8w4')
    """
    return ALIASES.get(recipe) or activations_first(recipe)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A recipe of one backend.

    Args:
        name: as in `backend.quantizer(name)`.
        text: one line of explanation.
        scheme: what every node gets.
        observers: which observers gather ranges.
        transforms: passes that prepare runs before it annotates, after the backend's own.
        algorithms: what is done to weights and ranges besides.
        rules: what some nodes get instead of `scheme`.
    """

    name: str
    text: str
    scheme: Scheme
    observers: ObserverChoice = field(default_factory=ObserverChoice)
    transforms: tuple[GraphPass, ...] = ()
    algorithms: tuple[Algorithm, ...] = ()
    rules: tuple[QuantRule, ...] = ()


def without_data(
    name: str,
    text: str,
    *,
    scheme_of: Callable[[str], Scheme] = scheme_named,
    embeddings: Sequence[QuantRule] = (),
    float_head: str = "w8",
    search: WeightSearch = WeightSearch.MIN_MAX,
    transforms: tuple[GraphPass, ...] = (),
) -> Recipe:
    """A recipe that needs no calibration: weights alone, or activations quantized at run time.

    Weights below 8 bits are found by least squared error. A linear that computes with an embedding
    table, the head of a language model, keeps 8 bits then: rounded to 4 bits it alone costs more
    than all other linears together.

    Args:
        name: of the scheme, and of the recipe.
        text: one line of explanation.
        scheme_of: the scheme of a name, as the backend's kernels take it.
        embeddings: what embedding tables get.
        float_head: the scheme of such a head among linears with float activations.
        search: how the scales of 8-bit weights are found.
        transforms: passes that prepare runs before it annotates.
    """
    scheme = scheme_of(name)
    weight = scheme.weight
    is_small = weight is not None and (weight.bits < 8 or weight.format is not None)
    head = scheme_named(float_head if scheme.input is None else "int8_dynamic")
    head_rule = QuantRule(kind=RuleKind.GLOBAL, scheme=head, where=is_tied_linear)
    rules = tables_of(embeddings, head if is_small else scheme)
    return Recipe(
        name=name,
        text=text,
        scheme=scheme,
        observers=ObserverChoice(search=WeightSearch.MSE if is_small else search),
        rules=(*rules, head_rule) if is_small else rules,
        transforms=transforms,
        algorithms=(BalanceChannels(),),
    )


def tables_of(embeddings: Sequence[QuantRule], linears: Scheme) -> tuple[QuantRule, ...]:
    """Rules for embedding tables, in the integers of the linears that may compute with them.

    Args:
        embeddings: the rules.
        linears: the scheme of those linears. If their activations are quantized, int8 tables are
            -127 .. 127, as their weights.
    """
    made = []
    for rule in embeddings:
        scheme = rule.scheme
        table = None if scheme is None else scheme.weight
        if scheme is not None and table is not None and table.is_full_int8 and linears.input:
            rule = replace(rule, scheme=replace(scheme, weight=table.narrowed()))
        made.append(rule)
    return tuple(made)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeFamily:
    """Recipes whose names follow a grammar: one entry in lists; each is made when asked for.

    Args:
        grammar: of the names, `w<2..8>[_g<32,64>]`: alternatives, and in brackets what may lack.
        text: one line of explanation.
        make: a recipe from its name and the text.
        names: the names, where the grammar does not say them.
    """

    grammar: str
    text: str
    make: Callable[[str, str], Recipe]
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.names:
            object.__setattr__(self, "names", names_of(self.grammar))


def names_of(grammar: str) -> tuple[str, ...]:
    """The names that a grammar stands for.

    >>> names_of("w<2..3>[_g<32,64>]")
    ('w2', 'w2_g32', 'w2_g64', 'w3', 'w3_g32', 'w3_g64')
    """
    parts = []
    for optional, plain in re.findall(r"\[([^\]]*)\]|([^\[]+)", grammar):
        parts.append(["", *_names(optional)] if optional else _names(plain))
    return tuple("".join(chosen) for chosen in product(*parts))


def _names(text: str) -> list[str]:
    """A text without brackets, with each combination of its alternatives."""
    choices = [_choices(part) for part in re.split(r"(<[^>]*>)", text)]
    return ["".join(chosen) for chosen in product(*choices)]


def _choices(part: str) -> list[str]:
    if not part.startswith("<"):
        return [part]
    low, dots, high = part[1:-1].partition("..")
    return [str(n) for n in range(int(low), int(high) + 1)] if dots else part[1:-1].split(",")


@dataclass(frozen=True, slots=True)
class Wanted:
    """The properties of a scheme by which the nearest recipe is found.

    Args:
        bits: of a code.
        is_activation: activations are quantized.
        is_dynamic: at run time.
        group_size: elements of a row that share a scale, None for whole rows and larger blocks.
        text: what it is, for people.
        format: of a small float or a code book, its name.
    """

    bits: int
    is_activation: bool
    is_dynamic: bool
    group_size: int | None
    text: str
    format: str = ""

    @classmethod
    def of(cls, scheme: Scheme) -> "Wanted":
        """The properties of a scheme with weights."""
        weight = scheme.weight
        assert weight is not None  # every scheme of a name has weights
        is_activation = scheme.input is not None
        is_dynamic = scheme.input is not None and scheme.input.is_dynamic
        return cls.of_weight(weight, is_activation=is_activation, is_dynamic=is_dynamic)

    @classmethod
    def of_weight(
        cls, weight: TensorScheme, *, is_activation: bool = False, is_dynamic: bool = False
    ) -> "Wanted":
        """The properties of a scheme of weights alone."""
        size = weight.granularity
        group = size.group_size if isinstance(size, PerGroup) else None
        form = _format_name(weight.format)
        return cls(weight.bits, is_activation, is_dynamic, group, str(weight), form)

    def distance(self, ours: "Wanted") -> tuple[int, ...]:
        """Return a recipe's distance: by codes, then when activations are quantized, then groups.

        A recipe with fewer bits, or without the groups of weights below 8 bits, loses accuracy;
        one with more bits only costs bytes.
        """
        groups = [wanted.group_size or 0 for wanted in (ours, self)]
        is_static = [wanted.is_activation and not wanted.is_dynamic for wanted in (ours, self)]
        return (
            ours.format != self.format,
            is_static[0] != is_static[1],
            ours.bits < self.bits,
            ours.bits >= self.bits + 4,
            groups[1] > 0 and groups[0] == 0 and ours.bits < 8,
            ours.is_activation != self.is_activation,
            abs(ours.bits - self.bits),
            bool(ours.format) != bool(self.format),
            groups[0] > groups[1],
            abs(groups[0] - groups[1]),
        )


def _format_name(form: NumberFormat | None) -> str:
    return "" if form is None else form.name


class Recipes(Mapping[str, str]):
    """The recipes of a backend: names, and grammars of names, with a line of explanation each.

    `name in recipes` holds for every name that a grammar stands for, too.

    Args:
        runtime: what runs them, as people write it.
        entries: in the order of lists; of two that are equally near the first is offered.
    """

    def __init__(self, runtime: str, entries: Sequence[Recipe | RecipeFamily]) -> None:
        self.runtime = runtime
        self.entries = tuple(entries)
        self._by_name: dict[str, Recipe | RecipeFamily] = {}
        for entry in entries:
            names = (entry.name,) if isinstance(entry, Recipe) else entry.names
            self._by_name |= {name: entry for name in names if name not in self._by_name}

    @property
    def names(self) -> tuple[str, ...]:
        """Every name, those of families one by one."""
        return tuple(self._by_name)

    def __getitem__(self, name: str) -> str:
        listed = {_listed(entry): entry.text for entry in self.entries}
        return listed[name] if name in listed else self._by_name[name].text

    def __iter__(self) -> Iterator[str]:
        return (_listed(entry) for entry in self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def named(self, name: str, table: OpTable | None = None) -> Recipe:
        """The recipe of a name.

        Args:
            name: of a recipe.
            table: says why there is none for a scheme of this name.

        Raises:
            ConfigError: there is none; the nearest one is offered where the name says a scheme,
                near names otherwise.
        """
        name = unaliased(name)
        entry = self._by_name.get(name)
        if isinstance(entry, RecipeFamily):
            return entry.make(name, entry.text)
        if entry is not None:
            return entry
        try:
            scheme = scheme_named(name)
        except ConfigError:
            offered = near(name, self._by_name)
            raise ConfigError(f'{self.runtime} has no recipe "{name}": {offered}') from None
        reason = table.refusal_of(scheme) if table is not None else ""
        raise ConfigError(
            f'{self.runtime} has no kernel for scheme "{name}"' + (f": {reason}" if reason else ""),
            fix=f'the nearest recipe it runs is "{self.nearest(Wanted.of(scheme))}"',
        )

    def nearest(self, wanted: Wanted) -> str:
        """The name of the recipe that comes nearest to what is asked for."""
        found = {name: Wanted.of(self.named(name).scheme) for name in self._by_name}
        return min(found, key=lambda name: wanted.distance(found[name]))


def _listed(entry: Recipe | RecipeFamily) -> str:
    return entry.name if isinstance(entry, Recipe) else entry.grammar
