"""Recipes of the CPU backend."""

from dataclasses import replace
from functools import partial

from pt2e_quant.backends.cpu.policy import place_by_speed, policy_of
from pt2e_quant.backends.cpu.table import REGISTRY
from pt2e_quant.backends.target.policy import place_integer_regions
from pt2e_quant.backends.target.recipe import (
    CHOICES_BY_DATA,
    FIT_PAIRS,
    Recipe,
    RecipeFamily,
    Recipes,
    without_data,
)
from pt2e_quant.core.schemes import INT8_WEIGHT, UINT8_ACTIVATION, Scheme
from pt2e_quant.flow.annotate.observer_choice import ObserverChoice
from pt2e_quant.graph.pipeline import GraphPass
from pt2e_quant.kernels.int4_linear.op import GROUP_SIZES
from pt2e_quant.kernels.registry import Registry
from pt2e_quant.observers.static.predicted_range import PredictedRangeObserver
from pt2e_quant.passes.algorithms.algorithm import Algorithm
from pt2e_quant.passes.algorithms.smooth_quant import SmoothQuant
from pt2e_quant.passes.attention.decompose_attention import narrow_attention

_REDUCED = replace(UINT8_ACTIVATION, quant_min=0, quant_max=127)

INT8 = Scheme(
    name="int8", input=UINT8_ACTIVATION, output=UINT8_ACTIVATION, weight=INT8_WEIGHT, bias=None
)
INT8_REDUCED = replace(INT8, name="int8_reduced", input=_REDUCED, output=_REDUCED)
"""Activations of 7 bits: exact sums with any weights, at half the resolution."""

_BEST = ObserverChoice(activation=PredictedRangeObserver)
_ALGORITHMS = (
    SmoothQuant(),
    *CHOICES_BY_DATA,
)


def _static(
    timed: tuple[GraphPass, ...],
    name: str,
    text: str,
    *first: GraphPass,
    scheme: Scheme = INT8,
    algorithms: tuple[Algorithm, ...] = (*FIT_PAIRS, *_ALGORITHMS),
) -> Recipe:
    """A recipe with calibrated activations; `timed` places layers by their measured times."""
    return Recipe(
        name=name,
        text=text,
        scheme=scheme,
        observers=_BEST,
        transforms=(*first, *timed),
        algorithms=algorithms,
    )


def _fitting(recipe: Recipe) -> Recipe:
    """A recipe whose sums are exact on any CPU."""
    return replace(recipe, algorithms=(*FIT_PAIRS, *recipe.algorithms))


def recipes_of(registry: Registry) -> Recipes:
    """The recipes; static ones place the layers of a registry's kernels by their measured times."""
    place = place_integer_regions(policy_of(registry))
    free = partial(without_data, transforms=(place,))

    static = partial(_static, (place_by_speed(registry), place))
    full = partial(static, algorithms=_ALGORITHMS)
    return Recipes(
        "CPU",
        (
            static(
                "int8",
                "static: uint8 activations per tensor, int8 weights per output channel; exact sums "
                "on any CPU",
            ),
            full(
                "int8_reduced",
                "the same with 7-bit activations and all of int8 for weights",
                scheme=INT8_REDUCED,
            ),
            full("int8_full", "the same with all of 8 bits for both: for CPUs with VNNI alone"),
            static(
                "int8_bf16",
                "int8, and float attention in bfloat16: for CPUs with AMX or AVX512-BF16",
                narrow_attention,
            ),
            _fitting(
                free(
                    "int8_dynamic",
                    "linears: int8 activations per token at run time, int8 weights per row; no "
                    "calibration; exact sums on any CPU",
                )
            ),
            free(
                "a8w4",
                "linears: int8 activations per token at run time, int4 weights per row, run as "
                "int8 ones; no calibration",
            ),
            free("w8", "linears: float32 activations, int8 weights per row; no calibration"),
            RecipeFamily(
                grammar=f"w4[_g<{','.join(map(str, GROUP_SIZES))}>]",
                text="linears: float32 activations, int4 weights per row or in groups; no "
                "calibration",
                make=free,
            ),
        ),
    )


RECIPES = recipes_of(REGISTRY)
