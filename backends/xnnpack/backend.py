"""The XNNPACK backend: importable without ExecuTorch, which only `lower` and `load` need."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.fx import GraphModule

from pt2e_quant.backends.artifact import Artifact, Backend, Verify
from pt2e_quant.backends.recipe_names import unaliased
from pt2e_quant.backends.xnnpack.quantizer import make_quantizer
from pt2e_quant.backends.xnnpack.recipes import RECIPES
from pt2e_quant.backends.xnnpack.table import TABLE
from pt2e_quant.core.errors import MissingExtraError
from pt2e_quant.core.max_sizes import MaxSizes
from pt2e_quant.flow.annotate.table_quantizer import TableQuantizer
from pt2e_quant.graph.op_table import OpTable

__all__ = ["BACKEND", "XnnpackBackend"]


class XnnpackBackend(Backend):
    """ExecuTorch programs whose operators run in the XNNPACK delegate."""

    name = "xnnpack"
    suffix = ".pte"
    extra = "xnnpack"
    packages = ("executorch",)

    @property
    def table(self) -> OpTable:
        """What the delegate runs in integers."""
        return TABLE

    @property
    def recipes(self) -> Mapping[str, str]:
        """Recipe names with a line of explanation each."""
        return {name: recipe.text for name, recipe in RECIPES.items()}

    def quantizer(self, recipe: str = "int8") -> TableQuantizer:
        """A fresh quantizer for a recipe.

        Raises:
            ConfigError: no recipe has that name.
        """
        return make_quantizer(unaliased(recipe))

    def lower(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Any] | None = None,
        *,
        strict: bool = True,
        verify: Verify = True,
        margin_db: float = 6.0,
        validate: bool = False,
        portable_only: bool = False,
        max_sizes: MaxSizes | None = None,
    ) -> Artifact:
        """Canonical graph to an ExecuTorch program; see `Backend.lower`.

        Args:
            gm: of convert_pt2e; it is not changed.
            example_inputs: inputs for the check run; calibration's first batch by default.
            strict: refuse when an operator of the table has to go back to float.
            verify: run the artifact against the canonical graph; "process": also in a new process.
            margin_db: how much nearer the artifact must be to the canonical graph than that
                is to the float graph.
            validate: see `Backend.lower`.
            portable_only: use only ExecuTorch's portable operators outside of the delegate.
            max_sizes: the largest size of dynamic dimensions, by input and dimension,
                {"x": {0: 64}}; the program's own bounds by default.

        Raises:
            InvariantError: the graph is not canonical.
            ArtifactError: the artifact fails its check.
            ConfigError: `max_sizes` names what there is not.
            UnsupportedError: a dimension has no upper bound; or strict, and an operator of the
                table went back to float.
            MissingExtraError: executorch is not installed.
        """
        lowering = _with_executorch("lower")
        found: Artifact = lowering.lower(
            gm,
            example_inputs,
            lowering.Options(
                strict=strict,
                verify=verify,
                margin_db=margin_db,
                validate=validate,
                portable_only=portable_only,
                max_sizes=max_sizes or {},
            ),
        )
        return found

    def load(self, path: str | Path) -> Artifact:
        """Read a `.pte` that an artifact of this backend saved.

        Raises:
            ArtifactError: the file is missing, damaged or not one of ours.
            MissingExtraError: executorch is not installed.
        """
        found: Artifact = _with_executorch("artifact").load(path)
        return found


def _with_executorch(module: str) -> ModuleType:
    """A module of this folder that needs ExecuTorch.

    Raises:
        MissingExtraError: executorch is not installed.
    """
    try:
        import_module("executorch")
    except ModuleNotFoundError as error:
        raise MissingExtraError("xnnpack", "executorch") from error
    return import_module(f"pt2e_quant.backends.xnnpack.{module}")


BACKEND = XnnpackBackend()
