"""A backend as data: an op table, recipes, a policy and a lowering."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch.fx import GraphModule

from pt2e_quant.backends.artifact import Artifact, Verify, is_installed
from pt2e_quant.backends.quiet import quiet_imports
from pt2e_quant.backends.target.policy import Policy
from pt2e_quant.backends.target.recipe import Recipes
from pt2e_quant.backends.target.recipe_file import RecipeName, as_recipe_file
from pt2e_quant.core.errors import ConfigError, MissingExtraError, near
from pt2e_quant.core.provenance import record_named
from pt2e_quant.flow.annotate.recurrent_layers import RecurrentForm
from pt2e_quant.flow.annotate.table_quantizer import TableQuantizer
from pt2e_quant.graph.op_table import SLOWER, OpTable
from pt2e_quant.graph.pipeline import GraphPass


class Lowers(Protocol):
    """Lowers graphs and loads artifacts: a `target.lower.Lowering`, imported when needed."""

    @property
    def options(self) -> type[Any]:
        """The class of the lowering's options."""

    @property
    def load(self) -> Callable[..., Artifact]:
        """The function that reads a file that an artifact saved."""

    def lower(
        self, gm: GraphModule, example_inputs: Sequence[Any] | None, options: Any
    ) -> Artifact:
        """Lower a canonical graph to an artifact."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Backend:
    """One place where quantized programs run.

    Args:
        name: as in `pt2e_quant.backends.get(name)`.
        suffix: of the files it writes, with the dot.
        table: what it can run.
        recipes: recipe names, and grammars of names, with a line of explanation each.
        lowering: returns the lowering, and imports the packages that it needs.
        extra: the extra of this package that it needs, "" for none.
        packages: the import names of the packages of that extra.
        caution: a warning, "experimental: …", shown wherever a user meets the backend; "" for none.
        options: defaults for `lower`, in place of those of the lowering's own options.
        policy: which operators stay float although the table could run them; None for none.
        allowed: the names of its preferences that are overruled.
        transforms: passes that prepare runs before it annotates, before a recipe's own.
        finishing: see `TableQuantizer`, as the fields below.
        recurrent: how recurrent layers run in integers; None leaves them float.
        computes_in: the float dtypes that there are kernels for; None for all.
        float_bodies: why bodies of control flow stay float; "" if they do not.
        loads_allowed: whether `load` also gets the options of `allowed`, as `lower` does.
    """

    name: str
    suffix: str
    table: OpTable
    recipes: Recipes
    lowering: Callable[[], Lowers]
    extra: str = ""
    packages: tuple[str, ...] = ()
    caution: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    policy: Policy | None = None
    allowed: frozenset[str] = frozenset()
    transforms: tuple[GraphPass, ...] = ()
    finishing: tuple[GraphPass, ...] = ()
    placing: tuple[GraphPass, ...] = ()
    recurrent: RecurrentForm | None = None
    computes_in: Collection[torch.dtype] | None = None
    float_bodies: str = ""
    loads_allowed: bool = False

    def allowing_slower(self) -> Self:
        """This backend, using integers also where they measured slower than float.

        Use it where size matters more than speed, for one artifact on many machines, or on the CPU
        backend with `compile()`, whose calls are faster than those that were measured. The report
        lists the operators.

        Raises:
            ConfigError: nothing of this backend was measured so.
        """
        if self.policy is None or SLOWER not in self.policy.preferences:
            raise ConfigError(
                f'backend "{self.name}" has no slower kernels to allow',
                fix="leave out --allow-slower",
            )
        return replace(self, allowed=self.allowed | {SLOWER})

    def require_extra(self) -> None:
        """Refuse before any long work where a package is missing.

        Raises:
            MissingExtraError: naming the package and the command that installs it.
        """
        for package in self.packages:
            if not is_installed(package):
                raise MissingExtraError(self.extra, package)

    def quantizer(self, recipe: RecipeName = "int8") -> TableQuantizer:
        """A fresh quantizer for a recipe.

        Args:
            recipe: a name, the path of a recipe file ("….toml"), or what was read from one.

        Raises:
            ConfigError: no recipe has that name; the nearest one is offered. Or the file cannot
                be read, or is of another backend.
        """
        if (file := as_recipe_file(recipe)) is not None:
            return file.quantizer(self)
        found = self.recipes.named(str(recipe), self.table)
        made = TableQuantizer(
            self.table,
            found.scheme,
            observers=found.observers,
            rules=found.rules,
            transforms=(*self.transforms, *found.transforms),
            algorithms=found.algorithms,
            finishing=self.finishing,
            placing=self.placing,
            recurrent=self.recurrent,
            computes_in=self.computes_in,
            preferences=self.policy.preferences if self.policy is not None else None,
            float_bodies=self.float_bodies,
        )
        return made.allowing(*self.allowed)

    def lower(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Any] | None = None,
        *,
        strict: bool = True,
        verify: Verify = True,
        margin_db: float = 6.0,
        validate: bool = False,
        record: str | None = None,
        measure: bool = False,
        **own: Any,
    ) -> Artifact:
        """Canonical graph to artifact.

        Args:
            gm: of convert_pt2e; it is not changed.
            example_inputs: inputs for the check run; calibration's first batch by default.
            strict: make errors of what the report would warn of.
            verify: run the artifact against the canonical graph, at several sizes of each dynamic
                dimension; "process": also saved, loaded and run in a new process first, so that
                a crash of the runtime is an error.
            margin_db: how much nearer the artifact must be to the canonical graph than that
                is to the float graph.
            validate: hold the graph against itself after each pass of the lowering, on the sample,
                fresh data and extreme inputs, and name the pass that changed a value.
            record: what the file keeps of how each tensor was quantized: "full", "brief" (names,
                scales, integer types) or "none"; None keeps the most that takes at most 4 KB and
                3 % of the constants.
            measure: time calls of the artifact and of the float program, lowered likewise, in
                turn on this machine, for the report; an artifact that is slower is warned of.
            own: what this backend has: `portable_only` and `max_sizes` (xnnpack), `portable`
                (onnx), `allow_slower` (xnnpack, onnx, cuda), `allow_unmeasured` (cuda); the
                backends' `Options` explain them.

        Raises:
            InvariantError: the graph is not canonical, or a pass changed what it computes.
            UnsupportedError: the backend cannot run a node as it is quantized.
            ArtifactError: the artifact fails its check.
            MissingExtraError: the backend's package is not installed.
            ConfigError: there is no such option, or record, or gm is something else.
        """
        self.require_extra()
        lowering = self._lowers()
        known = {f.name for f in fields(lowering.options)}
        chosen = {
            **self.options,
            **{name: True for name in self._allowances() if name in known},
            **{name: value for name, value in own.items() if value is not None},
        }
        for name in own:
            if name not in known:
                raise ConfigError(
                    f'backend "{self.name}" has no option "{name}" of lower: {near(name, known)}'
                )
        if not isinstance(gm, GraphModule):
            raise ConfigError(
                f"lower takes the graph of convert_pt2e, found {type(gm).__name__}",
                fix="convert_pt2e(calibrate(prepare_pt2e(program, quantizer), batches)), or "
                "pt2e_quant.quantize(model, example_inputs, …), which does all of it",
            )
        options = lowering.options(
            **chosen,
            strict=strict,
            verify=verify,
            margin_db=margin_db,
            validate=validate,
            record=record_named(record),
            measure=measure,
        )
        return self._with_caution(lowering.lower(gm, example_inputs, options))

    def load(self, path: str | Path, **own: Any) -> Artifact:
        """Read a file that an artifact of this backend saved.

        Args:
            path: of the file.
            own: what this backend alone has: `allow_unmeasured` and `allow_slower` (cuda).

        Raises:
            ArtifactError: the file is missing, damaged or not one of ours.
            MissingExtraError: the backend's package is not installed.
        """
        self.require_extra()
        return self._with_caution(self._lowers().load(path, **self._chosen(own)))

    def _lowers(self) -> Lowers:
        try:
            with quiet_imports():
                return self.lowering()
        except ImportError as error:
            # Found by the import system, but not importable: a broken or half-removed package.
            package = (error.name or "").split(".")[0]
            if package in self.packages:
                raise MissingExtraError(self.extra, package) from error
            raise

    def _allowances(self) -> list[str]:
        """The options of `lower` that the names in `allowed` stand for."""
        return [f"allow_{name}" for name in self.allowed]

    def _with_caution(self, artifact: Artifact) -> Artifact:
        if self.caution:
            artifact.report.notes.insert(0, f'backend "{self.name}" is {self.caution}')
        return artifact

    def _chosen(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """The backend's options with those of a call that are not None."""
        allowances = self._allowances() if self.loads_allowed else ()
        told = {**self.options, **dict.fromkeys(allowances, True)}
        return {**told, **{key: value for key, value in own.items() if value is not None}}
