"""The CUDA backend: fused Triton kernels on an NVIDIA GPU of compute capability 8.0 or later."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from pt2e_quant.backends.artifact import Backend, Verify
from pt2e_quant.backends.cuda.artifact import CudaArtifact
from pt2e_quant.backends.cuda.lower import SUFFIX, load, lower
from pt2e_quant.backends.cuda.quantizer import RECIPES, make_quantizer
from pt2e_quant.backends.cuda.table import REGISTRY, table_of
from pt2e_quant.backends.recipe_names import unaliased
from pt2e_quant.flow.annotate.table_quantizer import TableQuantizer
from pt2e_quant.graph.op_table import OpTable
from pt2e_quant.kernels.kernel import Kernel
from pt2e_quant.kernels.registry import Registry

__all__ = ["BACKEND", "CudaBackend"]


class CudaBackend(Backend):
    """Triton kernels from the registry.

    Args:
        registry: the kernels.
        allow_unmeasured: use kernels that were not measured on the device at hand; the report
            names them.
    """

    name = "cuda"
    suffix = SUFFIX

    def __init__(self, registry: Registry = REGISTRY, *, allow_unmeasured: bool = False) -> None:
        self.registry = registry
        self.allow_unmeasured = allow_unmeasured

    def with_kernels(self, *kernels: Kernel) -> "CudaBackend":
        """This backend with kernels of a user's own beside the registry's.

        Raises:
            ConfigError: a kernel is for another device, or its name is taken.
        """
        registry = self.registry.with_kernels(*kernels)
        return CudaBackend(registry, allow_unmeasured=self.allow_unmeasured)

    def allowing_unmeasured(self) -> "CudaBackend":
        """This backend with kernels in use that nobody measured on the device at hand."""
        return CudaBackend(self.registry, allow_unmeasured=True)

    @property
    def table(self) -> OpTable:
        """What the kernels run."""
        return table_of(self.registry)

    @property
    def recipes(self) -> Mapping[str, str]:
        """Recipe names with a line of explanation each."""
        return {name: recipe.text for name, recipe in RECIPES.items()}

    def quantizer(self, recipe: str = "int8") -> TableQuantizer:
        """A fresh quantizer for a recipe; see `Backend.quantizer`."""
        return make_quantizer(unaliased(recipe), self.registry)

    def lower(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Any] | None = None,
        *,
        strict: bool = True,
        verify: Verify = True,
        margin_db: float = 6.0,
        validate: bool = False,
        allow_unmeasured: bool | None = None,
    ) -> CudaArtifact:
        """Canonical graph to a module of fused kernels, on the device that the graph lies on.

        Args:
            gm: of convert_pt2e.
            example_inputs: inputs for the check run; calibration's first batch by default.
            strict: refuse a program that would dequantize a weight in every call.
            verify: run the artifact once against the canonical graph; on a CPU by the kernels'
                definitions.
            margin_db: see `Backend.lower`.
            validate: see `Backend.lower`.
            allow_unmeasured: the backend's own by default.

        Raises:
            InvariantError: the graph is not canonical.
            UnsupportedError: under `strict`, no kernel takes a quantized weight.
            ArtifactError: the artifact fails its check.
        """
        allowed = self.allow_unmeasured if allow_unmeasured is None else allow_unmeasured
        return lower(
            gm,
            example_inputs,
            self.registry,
            allow_unmeasured=allowed,
            strict=strict,
            verify=verify,
            margin_db=margin_db,
            validate=validate,
        )

    def load(self, path: str | Path, *, allow_unmeasured: bool | None = None) -> CudaArtifact:
        """Read a .qcuda that an artifact of this backend saved, and lower it for this machine.

        Args:
            path: of the file.
            allow_unmeasured: use kernels that were not measured on the device at hand. By default
                as the file was lowered; True for a backend that allows them. Where no kernel takes
                a quantized weight then, a warning says which argument to give, unless the file was
                lowered with strict=False.

        Raises:
            ArtifactError: the file is missing, damaged or not one of ours.
        """
        allowed = True if allow_unmeasured is None and self.allow_unmeasured else allow_unmeasured
        return load(path, self.registry, allow_unmeasured=allowed)


BACKEND = CudaBackend()
