"""The ONNX backend: importable without the extra, which only lowering and loading need."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from pt2e_quant.backends.artifact import Artifact, Backend, Verify
from pt2e_quant.backends.onnx.quantizer import make_quantizer
from pt2e_quant.backends.onnx.recipes import RECIPES
from pt2e_quant.backends.onnx.table import TABLE
from pt2e_quant.backends.recipe_names import unaliased
from pt2e_quant.core.errors import MissingExtraError
from pt2e_quant.flow.annotate.table_quantizer import TableQuantizer
from pt2e_quant.graph.op_table import OpTable

__all__ = ["BACKEND", "OnnxBackend"]


class OnnxBackend(Backend):
    """ONNX Runtime's CPU provider."""

    name = "onnx"
    suffix = ".onnx"
    extra = "onnx"
    packages = ("onnx", "onnxscript", "onnxruntime")

    @property
    def table(self) -> OpTable:
        """What ONNX Runtime runs in integers."""
        return TABLE

    @property
    def recipes(self) -> Mapping[str, str]:
        """Recipe names with a line of explanation each."""
        return {recipe.name: recipe.text for recipe in RECIPES.values()}

    def quantizer(self, recipe: str = "int8") -> TableQuantizer:
        """A fresh quantizer for a recipe; see `Backend.quantizer`."""
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
        portable: bool = False,
    ) -> Artifact:
        """Canonical graph to an .onnx artifact; see `Backend.lower`.

        Args:
            gm: of convert_pt2e.
            example_inputs: inputs for the check run.
            strict: make errors of what the report would warn of.
            verify: run the artifact against the canonical graph; "process": also in a new process.
            margin_db: how much nearer to the canonical graph than that is to the float graph.
            validate: see `Backend.lower`.
            portable: use operators of the ONNX standard only, none of ONNX Runtime's own.
        """
        _require_extra()
        from pt2e_quant.backends.onnx.lower import lower

        return lower(
            gm,
            example_inputs,
            strict=strict,
            verify=verify,
            margin_db=margin_db,
            validate=validate,
            portable=portable,
        )

    def load(self, path: str | Path) -> Artifact:
        """Read an .onnx file that an artifact wrote; see `Backend.load`."""
        _require_extra()
        from pt2e_quant.backends.onnx.artifact import read_artifact

        return read_artifact(Path(path))


def _require_extra() -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("onnx", error.name or "onnx") from error


BACKEND = OnnxBackend()
