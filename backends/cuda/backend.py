"""The CUDA backend: fused Triton kernels on an NVIDIA GPU of compute capability 8.0 or later."""

from dataclasses import dataclass, replace

import torch

from pt2e_quant.backends.cuda.lower import LOWERING, SUFFIX
from pt2e_quant.backends.cuda.policy import UNMEASURED, policy_of
from pt2e_quant.backends.cuda.recipes import RECIPES
from pt2e_quant.backends.cuda.table import REGISTRY, TABLE, table_of
from pt2e_quant.backends.target.backend import Backend
from pt2e_quant.kernels.kernel import Kernel
from pt2e_quant.passes.cleanup.linear_forms import products_as_linears


@dataclass(frozen=True, kw_only=True, eq=False)
class CudaBackend(Backend):
    """Triton kernels out of a registry."""

    def with_kernels(self, *kernels: Kernel) -> "CudaBackend":
        """This backend with kernels of a user's own beside the registry's.

        Raises:
            ConfigError: a kernel is for another device, or its name is taken.
        """
        registry = self.options["registry"].with_kernels(*kernels)
        options = {**self.options, "registry": registry}
        return replace(self, table=table_of(registry), policy=policy_of(registry), options=options)

    def allowing_unmeasured(self) -> "CudaBackend":
        """This backend with kernels in use that nobody measured on the device at hand."""
        return replace(self, allowed=self.allowed | {UNMEASURED})


BACKEND = CudaBackend(
    name="cuda",
    suffix=SUFFIX,
    table=TABLE,
    recipes=RECIPES,
    lowering=lambda: LOWERING,
    policy=policy_of(REGISTRY),
    loads_allowed=True,
    caution="experimental: not yet measured on a GPU",
    options={"registry": REGISTRY},
    transforms=(products_as_linears,),
    computes_in=(torch.float32, torch.bfloat16, torch.float16),
)
