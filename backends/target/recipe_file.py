"""Recipes as files: a recipe of a backend with other schemes for some nodes, in TOML."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from pt2e_quant.backends.artifact import write_artifact
from pt2e_quant.backends.target.recipe import unaliased
from pt2e_quant.core.errors import ConfigError, near
from pt2e_quant.flow.annotate.rules import QuantRule, RuleKind
from pt2e_quant.flow.annotate.table_quantizer import TableQuantizer
from pt2e_quant.observers.static.entropy import EntropyObserver
from pt2e_quant.observers.static.histogram import HistogramObserver
from pt2e_quant.observers.static.minmax import MinMaxObserver
from pt2e_quant.observers.static.mse import MSEObserver
from pt2e_quant.observers.static.percentile import PercentileObserver
from pt2e_quant.passes.algorithms.algorithm import Algorithm
from pt2e_quant.passes.algorithms.registry import algorithm_named

if TYPE_CHECKING:
    from pt2e_quant.backends.target.backend import Backend

FLOAT = "float"
"""The scheme of what is not quantized."""

SUFFIX = ".toml"
_VERSION = 1
_RANGES = {
    "min_max": MinMaxObserver,
    "histogram": HistogramObserver,
    "mse": MSEObserver,
    "percentile": PercentileObserver,
    "entropy": EntropyObserver,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeScheme:
    """Another scheme for one node.

    Args:
        node: its name in the graph that is annotated: a glob, or a regex after "re:".
        scheme: "float", or a recipe of the backend: the node gets its scheme, its ranges and
            searches, and those of its algorithms that apply to a node. Of the file's own recipe it
            gets what the file says of all nodes.
        ranges: how its ranges are found, as `RecipeFile` has it.
        algorithms: others that are applied to it.
        why: a note for the reader.

    Raises:
        ConfigError: there are no such ranges, or a float node is given some.
    """

    node: str
    scheme: str
    ranges: str = ""
    algorithms: tuple[str, ...] = ()
    why: str = ""

    def __post_init__(self) -> None:
        _check_ranges(self.ranges)
        if self.scheme == FLOAT and (self.ranges or self.algorithms):
            raise ConfigError(f'the rule of node "{self.node}" leaves it float: it has no ranges')


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeFile:
    """A recipe of a backend with changes.

    Args:
        backend: its name.
        recipe: what every node gets that no rule speaks about.
        ranges: how ranges of activations are found: "min_max", "histogram", "mse", "percentile"
            or "entropy"; "" as the recipe has it.
        without: algorithms of the recipe that are left out.
        algorithms: others that are added.
        rules: other schemes for some nodes.

    Raises:
        ConfigError: there are no such ranges.
    """

    backend: str
    recipe: str = "int8"
    ranges: str = ""
    without: tuple[str, ...] = ()
    algorithms: tuple[str, ...] = ()
    rules: tuple[NodeScheme, ...] = ()

    def __post_init__(self) -> None:
        _check_ranges(self.ranges)

    def quantizer(self, target: "Backend") -> TableQuantizer:
        """A fresh quantizer for it.

        Raises:
            ConfigError: it is of another backend, or the backend has no such recipe.
        """
        if target.name != self.backend:
            raise ConfigError(
                f'this recipe is of backend "{self.backend}", not of "{target.name}"',
                fix=f'backend="{self.backend}", or search one for "{target.name}" with pq.tune',
            )
        made = target.quantizer(self.recipe)
        if self.ranges:
            made.with_observers(activation=_RANGES[self.ranges])
        for name in self.without:
            made.remove_algorithm(name)
        for name in self.algorithms:
            made.add_algorithm(name)
        for rule in self.rules:
            if rule.scheme == FLOAT:
                made.set_node(rule.node, None)
            else:
                made.add_rule(*self._ruled(rule, made, target))
        return made

    def _ruled(
        self, rule: NodeScheme, made: TableQuantizer, target: "Backend"
    ) -> tuple[QuantRule, list[Algorithm]]:
        """A rule of the file as the quantizer takes it, with the algorithms that it asks for."""
        named = target.recipes.named(rule.scheme, target.table)
        if unaliased(rule.scheme) == unaliased(self.recipe):
            observers = made.observers
            algorithms = [a for a in made.algorithms if a.name not in made.ruled_algorithms]
        else:
            observers, algorithms = named.observers, list(named.algorithms)
        if rule.ranges:
            observers = replace(observers, activation=_RANGES[rule.ranges])
        algorithms += map(algorithm_named, rule.algorithms)
        found = QuantRule(
            kind=RuleKind.NODE,
            pattern=rule.node,
            scheme=named.scheme,
            observers=observers,
            algorithms=frozenset(algorithm.name for algorithm in algorithms),
        )
        return found, algorithms

    def to_toml(self) -> str:
        """The file's text, which `read` reads."""
        lines = [f"version = {_VERSION}", f"backend = {json.dumps(self.backend)}"]
        lines.append(f"recipe = {json.dumps(self.recipe)}")
        if self.ranges:
            lines.append(f"ranges = {json.dumps(self.ranges)}")
        for name in ("without", "algorithms"):
            if listed := getattr(self, name):
                lines.append(f"{name} = {json.dumps(list(listed))}")
        for rule in self.rules:
            lines += ["", "[[rule]]", f"node = {json.dumps(rule.node)}"]
            lines.append(f"scheme = {json.dumps(rule.scheme)}")
            if rule.ranges:
                lines.append(f"ranges = {json.dumps(rule.ranges)}")
            if rule.algorithms:
                lines.append(f"algorithms = {json.dumps(list(rule.algorithms))}")
            if rule.why:
                lines.append(f"why = {json.dumps(rule.why)}")
        return "\n".join(lines) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the .toml file, which `quantize(recipe=path)` takes.

        Raises:
            ConfigError: the path does not end in .toml.
            ArtifactError: it cannot be written.
        """
        if Path(path).suffix != SUFFIX:
            raise ConfigError(f'a recipe file ends in {SUFFIX}, found "{path}"')
        write_artifact(path, self.to_toml().encode())


RecipeName: TypeAlias = str | Path | RecipeFile
"""A recipe's name, the path of a recipe file, or such a file that was read."""


def as_recipe_file(recipe: RecipeName) -> RecipeFile | None:
    """The recipe file that a caller gave or named by its path; None for the name of a recipe.

    Raises:
        ConfigError: the file cannot be read, or it is something else.
    """
    if isinstance(recipe, RecipeFile):
        return recipe
    if isinstance(recipe, Path) or (isinstance(recipe, str) and recipe.endswith(SUFFIX)):
        return read_recipe(recipe)
    if isinstance(recipe, str):
        return None
    raise ConfigError(
        f"a recipe is a name or a recipe file, found {type(recipe).__name__}",
        fix='recipe="int8", or recipe="mixed.toml"',
    )


def read_recipe(path: str | Path) -> RecipeFile:
    """Read a recipe file.

    Raises:
        ConfigError: the file is missing, is no TOML, or has a key that means nothing.
    """
    try:
        data = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(
            f'cannot read the recipe file "{path}": {error.strerror or error}',
            fix="check the path; `RecipeFile.save` and `pq.tune(…).recipe.save` write such files",
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f'"{path}" is no TOML: {error}') from error
    version = data.pop("version", _VERSION)
    if version != _VERSION:
        raise ConfigError(
            f'"{path}" is of version {version}, this package reads {_VERSION}',
            fix="pip install -U pt2e-quant",
        )
    rules = [
        _checked(NodeScheme, {**rule, "algorithms": tuple(rule.get("algorithms", ()))}, path)
        for rule in data.pop("rule", ())
    ]
    for name in ("without", "algorithms"):
        data[name] = tuple(data.get(name, ()))
    found: RecipeFile = _checked(RecipeFile, {**data, "rules": tuple(rules)}, path)
    return found


def _check_ranges(ranges: str) -> None:
    if ranges and ranges not in _RANGES:
        raise ConfigError(f'there are no ranges "{ranges}": {near(ranges, _RANGES)}')


def _checked(kind: type[Any], data: Mapping[str, Any], path: str | Path) -> Any:
    """An object of its fields, all of which must be known."""
    known = {field.name for field in fields(kind)}
    for key in data:
        if key not in known:
            raise ConfigError(f'"{path}" has a key "{key}": {near(key, known)}')
    try:
        return kind(**data)
    except TypeError as error:
        raise ConfigError(
            f'"{path}" is incomplete: {error}',
            fix='a recipe file says backend = "…"; a rule says node = "…" and scheme = "…"',
        ) from error
