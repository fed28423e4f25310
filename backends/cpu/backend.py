"""The CPU backend: runs wherever torch runs with oneDNN, and needs no extra."""

from dataclasses import dataclass, replace

import torch

from pt2e_quant.backends.cpu.lower import LOWERING, SUFFIX
from pt2e_quant.backends.cpu.policy import policy_of, recurrent_form
from pt2e_quant.backends.cpu.recipes import recipes_of
from pt2e_quant.backends.cpu.table import REGISTRY, table_of
from pt2e_quant.backends.target.backend import Backend
from pt2e_quant.kernels.kernel import Kernel
from pt2e_quant.kernels.registry import Registry
from pt2e_quant.passes.cleanup.activate_before_moves import activate_before_moves
from pt2e_quant.passes.cleanup.einsums_as_products import einsums_as_products
from pt2e_quant.passes.cleanup.linear_forms import products_as_linears


@dataclass(frozen=True, kw_only=True, eq=False)
class CpuBackend(Backend):
    """oneDNN's integer operators in torch itself, out of a registry of kernels."""

    def with_kernels(self, *kernels: Kernel) -> "CpuBackend":
        """This backend with kernels of a user's own beside the registry's.

        Raises:
            ConfigError: a kernel is for another device, or its name is taken.
        """
        return self._on(self.options["registry"].with_kernels(*kernels))

    def without_trials(self) -> "CpuBackend":
        """This backend with integer products taken as they are.

        By default each distinct product is tried once on this machine, in a child process, and
        one that oneDNN computes wrongly stays float. Also for all backends of a process:
        PT2E_QUANT_TRIALS=0 in the environment.
        """
        return replace(self, options={**self.options, "tries": False})

    def _on(self, registry: Registry) -> "CpuBackend":
        return replace(
            self,
            table=table_of(registry),
            recipes=recipes_of(registry),
            policy=policy_of(registry),
            options={**self.options, "registry": registry},
        )


BACKEND = CpuBackend(
    name="cpu",
    suffix=SUFFIX,
    table=table_of(REGISTRY),
    recipes=recipes_of(REGISTRY),
    lowering=lambda: LOWERING,
    policy=policy_of(REGISTRY),
    options={"registry": REGISTRY},
    transforms=(einsums_as_products, products_as_linears, activate_before_moves),
    recurrent=recurrent_form,
    computes_in=(torch.float32,),
)
