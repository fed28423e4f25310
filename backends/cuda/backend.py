"""The CUDA backend and its recipes: fused Triton kernels on NVIDIA GPUs, 8.0 or later."""

from dataclasses import dataclass, replace
from functools import partial

import torch

from pt2e_quant.backends.cuda.lower import LOWERING, SUFFIX
from pt2e_quant.backends.cuda.policy import UNMEASURED, policy_of
from pt2e_quant.backends.cuda.table import REGISTRY, TABLE, table_of
from pt2e_quant.backends.target.backend import Backend
from pt2e_quant.backends.target.recipe import (
    CHOICES_BY_DATA,
    Recipe,
    RecipeFamily,
    Recipes,
    without_data,
)
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.core.schemes import INT8_ACTIVATION, INT8_WEIGHT, Scheme
from pt2e_quant.flow.annotate.observer_choice import ObserverChoice
from pt2e_quant.flow.annotate.rules import QuantRule, RuleKind
from pt2e_quant.graph.tied_tables import is_embedding
from pt2e_quant.kernels.int4_linear.op import GROUP_SIZES
from pt2e_quant.kernels.kernel import Kernel
from pt2e_quant.observers.static.predicted_range import PredictedRangeObserver
from pt2e_quant.passes.algorithms.smooth_quant import SmoothQuant
from pt2e_quant.passes.cleanup.activate_before_moves import activate_before_moves
from pt2e_quant.passes.cleanup.einsums_as_products import einsums_as_products
from pt2e_quant.passes.cleanup.linear_forms import products_as_linears

_TABLES = QuantRule(kind=RuleKind.GLOBAL, scheme=scheme_named("w8"), where=is_embedding)
"""Embedding tables have int8 rows whatever the linears have: rounding there is in every layer."""

# No kernel takes int8 weights with float activations.
_without_data = partial(without_data, embeddings=(_TABLES,), float_head="int8_dynamic")
_NO_DATA = "; embeddings int8 per row; no calibration"
_GROUPS = f"[_g<{','.join(map(str, GROUP_SIZES))}>]"


def _float8(name: str, text: str) -> Recipe:
    return Recipe(name=name, text=text, scheme=scheme_named(name))


RECIPES = Recipes(
    "CUDA",
    (
        Recipe(
            name="int8",
            text="static int8: activations per tensor, weights per channel, outlier channels "
            "scaled",
            scheme=Scheme(
                name="int8", input=INT8_ACTIVATION, output=INT8_ACTIVATION, weight=INT8_WEIGHT
            ),
            observers=ObserverChoice(activation=PredictedRangeObserver),
            algorithms=(
                SmoothQuant(),
                *CHOICES_BY_DATA,
            ),
        ),
        _without_data(
            "int8_dynamic",
            "linears: int8 activations per token at run time, int8 weights per row" + _NO_DATA,
        ),
        _without_data(
            "int8_dynamic_per_tensor",
            "linears: int8 activations per tensor at run time, int8 weights per row" + _NO_DATA,
        ),
        RecipeFamily(
            grammar=f"w4{_GROUPS}",
            text="linears: float activations, int4 weights per row or in groups" + _NO_DATA,
            make=_without_data,
        ),
        RecipeFamily(
            grammar=f"a8w4{_GROUPS}",
            text="linears: int8 activations per token at run time, int4 weights per row or in "
            "groups" + _NO_DATA,
            make=_without_data,
        ),
        _float8(
            "fp8", "linears: float8 e4m3 activations per tensor, calibrated, and weights per row"
        ),
        _float8(
            "fp8_dynamic",
            "linears: float8 e4m3 activations per token at run time, and weights per row; no "
            "calibration",
        ),
        _float8(
            "fp8_dynamic_per_tensor",
            "linears: float8 e4m3 activations and weights per tensor, at run time; no calibration",
        ),
    ),
)


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
        """This backend with kernels in use that were not measured on the device at hand."""
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
    transforms=(einsums_as_products, products_as_linears, activate_before_moves),
    computes_in=(torch.float32, torch.bfloat16, torch.float16),
)
