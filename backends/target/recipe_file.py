"""Recipes as files: a recipe of a backend with other schemes for some nodes, in TOML."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pt2e_quant.core.errors import ArtifactError, ConfigError, near
from pt2e_quant.core.whole_file import whole_file
from pt2e_quant.flow.annotate.table_quantizer import TableQuantizer
from pt2e_quant.observers.static.entropy import EntropyObserver
from pt2e_quant.observers.static.histogram import HistogramObserver
from pt2e_quant.observers.static.minmax import MinMaxObserver
from pt2e_quant.observers.static.mse import MSEObserver
from pt2e_quant.observers.static.percentile import PercentileObserver

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
        scheme: "float", or a recipe of the backend, whose scheme the node gets.
        why: a note for the reader.
    """

    node: str
    scheme: str
    why: str = ""


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
        if self.ranges and self.ranges not in _RANGES:
            raise ConfigError(f'there are no ranges "{self.ranges}": {near(self.ranges, _RANGES)}')

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
            scheme = None
            if rule.scheme != FLOAT:
                scheme = target.recipes.named(rule.scheme, target.table).scheme
            made.set_node(rule.node, scheme)
        return made

    def to_toml(self) -> str:
        """As text; `read` takes it again."""
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
        try:
            with whole_file(Path(path)) as stream:
                stream.write(self.to_toml().encode())
        except OSError as error:
            raise ArtifactError(
                f'cannot write "{path}": {error.strerror or error}',
                fix="give a path in a folder that exists and can be written",
            ) from error


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
    rules = [_checked(NodeScheme, rule, path) for rule in data.pop("rule", ())]
    for name in ("without", "algorithms"):
        data[name] = tuple(data.get(name, ()))
    found: RecipeFile = _checked(RecipeFile, {**data, "rules": tuple(rules)}, path)
    return found


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
