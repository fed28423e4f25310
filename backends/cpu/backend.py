"""The CPU backend: runs wherever torch runs with oneDNN, and needs no extra."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from pt2e_quant.backends.artifact import Artifact, Backend
from pt2e_quant.backends.cpu.lower import load, lower
from pt2e_quant.backends.cpu.quantizer import RECIPES, make_quantizer
from pt2e_quant.backends.cpu.table import TABLE
from pt2e_quant.flow.table_quantizer import TableQuantizer
from pt2e_quant.graph.op_table import OpTable

__all__ = ["BACKEND", "CpuBackend"]


class CpuBackend(Backend):
    """oneDNN's integer operators in torch itself."""

    name = "cpu"
    suffix = ".qpt2"

    @property
    def table(self) -> OpTable:
        """What oneDNN runs in integers."""
        return TABLE

    @property
    def recipes(self) -> Mapping[str, str]:
        """Recipe names with a line of explanation each."""
        return {name: recipe.text for name, recipe in RECIPES.items()}

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
        """Canonical graph to a module of fused operators; see `Backend.lower`.

        Raises:
            InvariantError: the graph is not canonical.
            UnsupportedError: sums would saturate on this machine; or, under `strict`, a weight
                would be dequantized in every call.
            ArtifactError: the artifact fails its check.
        """
        return lower(gm, example_inputs, strict=strict, verify=verify, margin_db=margin_db)

    def load(self, path: str | Path) -> Artifact:
        """Read a .qpt2 that an artifact of this backend saved; see `Backend.load`."""
        return load(path)


BACKEND = CpuBackend()
