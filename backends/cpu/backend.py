"""The CPU backend: runs wherever torch runs with oneDNN, and needs no extra."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from pt2e_quant.backends.artifact import Backend, Verify
from pt2e_quant.backends.cpu.artifact import CpuArtifact
from pt2e_quant.backends.cpu.lower import SUFFIX, load, lower
from pt2e_quant.backends.cpu.quantizer import RECIPES, make_quantizer
from pt2e_quant.backends.cpu.table import REGISTRY, table_of
from pt2e_quant.backends.recipe_names import unaliased
from pt2e_quant.flow.annotate.table_quantizer import TableQuantizer
from pt2e_quant.graph.op_table import OpTable
from pt2e_quant.kernels.kernel import Kernel
from pt2e_quant.kernels.onednn.speed import whatever_measured
from pt2e_quant.kernels.registry import Registry

__all__ = ["BACKEND", "CpuBackend"]


class CpuBackend(Backend):
    """oneDNN's integer operators in torch itself.

    Args:
        registry: the kernels.
        tries: try each distinct integer product once on this machine before it is used.
    """

    name = "cpu"
    suffix = SUFFIX

    def __init__(self, registry: Registry = REGISTRY, *, tries: bool = True) -> None:
        self.registry = registry
        self.tries = tries

    def with_kernels(self, *kernels: Kernel) -> "CpuBackend":
        """This backend with kernels of a user's own beside the registry's.

        Raises:
            ConfigError: a kernel is for another device, or its name is taken.
        """
        return CpuBackend(self.registry.with_kernels(*kernels), tries=self.tries)

    def allowing_slower(self) -> "CpuBackend":
        """This backend with layers quantized also where that measured slower than float here.

        For what is to be small rather than fast, for one artifact on many machines, and for
        `compile()`, whose calls are faster than those that were measured. The report says which.
        """
        kernels = (replace(k, row=whatever_measured(k.row)) for k in self.registry)
        return CpuBackend(Registry(self.registry.device, tuple(kernels)), tries=self.tries)

    def without_trials(self) -> "CpuBackend":
        """This backend with integer products taken as they are.

        By default each distinct product is tried once on this machine, in a child process, and
        one that oneDNN computes wrongly stays float. Also for all backends of a process:
        PT2E_QUANT_TRIALS=0 in the environment.
        """
        return CpuBackend(self.registry, tries=False)

    @property
    def table(self) -> OpTable:
        """What oneDNN runs in integers."""
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
    ) -> CpuArtifact:
        """Canonical graph to a module of fused operators; see `Backend.lower`.

        Raises:
            InvariantError: the graph is not canonical.
            UnsupportedError: sums would saturate on this machine; or, under `strict`, a weight
                would be dequantized in every call.
            ArtifactError: the artifact fails its check.
        """
        return lower(
            gm,
            example_inputs,
            self.registry,
            strict=strict,
            verify=verify,
            margin_db=margin_db,
            tries=self.tries,
            validate=validate,
        )

    def load(self, path: str | Path) -> CpuArtifact:
        """Read a .qpt2 that an artifact of this backend saved; see `Backend.load`."""
        return load(path, self.registry, tries=self.tries)


BACKEND = CpuBackend()
