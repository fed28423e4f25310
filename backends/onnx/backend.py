"""The ONNX backend: importable without the extra, which only lowering and loading need."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from pt2e_quant.backends.artifact import Artifact, Backend
from pt2e_quant.backends.onnx.quantizer import RECIPES, make_quantizer
from pt2e_quant.backends.onnx.table import TABLE
from pt2e_quant.core.errors import MissingExtraError
from pt2e_quant.flow.op_table import OpTable
from pt2e_quant.flow.table_quantizer import TableQuantizer

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
        return make_quantizer(recipe)

    def lower(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Any] | None = None,
        *,
        strict: bool = True,
        verify: bool = True,
        margin_db: float = 6.0,
    ) -> Artifact:
        """Canonical graph to an .onnx artifact; see `Backend.lower`."""
        _require_extra()
        from pt2e_quant.backends.onnx.lower import lower

        return lower(gm, example_inputs, strict=strict, verify=verify, margin_db=margin_db)

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
