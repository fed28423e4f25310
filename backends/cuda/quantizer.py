"""Recipes of the CUDA backend, and the quantizers made from them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from pt2e_quant.backends.cuda.table import REGISTRY, table_of
from pt2e_quant.backends.no_recipe import no_recipe
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.core.schemes import INT8_ACTIVATION, INT8_WEIGHT, Scheme
from pt2e_quant.flow.annotate.observer_choice import ObserverChoice
from pt2e_quant.flow.annotate.rules import QuantRule, RuleKind
from pt2e_quant.flow.annotate.table_quantizer import TableQuantizer
from pt2e_quant.graph.pipeline import GraphPass
from pt2e_quant.graph.tied_tables import is_embedding, is_tied_linear
from pt2e_quant.kernels.int4_linear.op import GROUP_SIZES
from pt2e_quant.kernels.registry import Registry
from pt2e_quant.observers.static.channel_statistics import ChannelStatisticsObserver
from pt2e_quant.observers.static.predicted_range import PredictedRangeObserver
from pt2e_quant.observers.weights.weight_search import WeightSearch
from pt2e_quant.passes.algorithms.smooth_quant import smooth_quant
from pt2e_quant.passes.cleanup.products_as_linears import products_as_linears

__all__ = ["RECIPES", "Recipe", "make_quantizer"]

_LINEARS = ("linear", "linear_activation", "linear_add")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a recipe name stands for.

    Args:
        text: one line of explanation.
        scheme: what every node gets.
        observers: which observers gather ranges.
        algorithms: passes that convert runs on the calibrated graph.
        rules: what some nodes get instead.
        balances_channels: even out the channels of linears' inputs, from weights alone.
    """

    text: str
    scheme: Scheme
    observers: ObserverChoice = field(default_factory=ObserverChoice)
    algorithms: tuple[GraphPass, ...] = ()
    rules: tuple[QuantRule, ...] = ()
    balances_channels: bool = False


_TABLES = QuantRule(kind=RuleKind.GLOBAL, scheme=scheme_named("w8"), where=is_embedding)
"""Embedding tables have int8 rows whatever the linears have: rounding there is in every layer."""


def _without_data(name: str, text: str) -> Recipe:
    scheme = scheme_named(name)
    is_small = scheme.weight is not None and scheme.weight.bits < 8
    # The head of a language model with tied tables: rounded to 4 bits it alone costs more than
    # all other linears together.
    head = QuantRule(
        kind=RuleKind.GLOBAL, scheme=scheme_named("int8_dynamic"), where=is_tied_linear
    )
    return Recipe(
        text=f"{text}; embeddings int8 per row; no calibration",
        scheme=scheme,
        observers=ObserverChoice(search=WeightSearch.MSE if is_small else WeightSearch.MIN_MAX),
        rules=(_TABLES, head) if is_small else (_TABLES,),
        balances_channels=True,
    )


RECIPES: Mapping[str, Recipe] = {
    "int8": Recipe(
        text="static int8: activations per tensor, weights per channel, outlier channels scaled",
        scheme=Scheme(
            name="int8", input=INT8_ACTIVATION, output=INT8_ACTIVATION, weight=INT8_WEIGHT
        ),
        observers=ObserverChoice(
            activation=PredictedRangeObserver,
            by_slot={(row, "x"): ChannelStatisticsObserver for row in _LINEARS},
        ),
        algorithms=(smooth_quant,),
    ),
    "int8_dynamic": _without_data(
        "int8_dynamic", "linears: int8 activations per token at run time, int8 weights per row"
    ),
    "int8_dynamic_per_tensor": _without_data(
        "int8_dynamic_per_tensor",
        "linears: int8 activations per tensor at run time, int8 weights per row",
    ),
    "w4": _without_data("w4", "linears: float activations, int4 weights per row"),
    **{
        f"w4_g{size}": _without_data(
            f"w4_g{size}", f"linears: float activations, int4 weights in groups of {size}"
        )
        for size in GROUP_SIZES
    },
    "a8w4": _without_data(
        "a8w4", "linears: int8 activations per token at run time, int4 weights per row"
    ),
    **{
        f"a8w4_g{size}": _without_data(
            f"a8w4_g{size}",
            f"linears: int8 activations per token at run time, int4 weights in groups of {size}",
        )
        for size in GROUP_SIZES
    },
    "fp8": Recipe(
        text="linears: float8 e4m3 activations per tensor, calibrated, and weights per row",
        scheme=scheme_named("fp8"),
    ),
    "fp8_dynamic": Recipe(
        text="linears: float8 e4m3 activations per token at run time, and weights per row; no "
        "calibration",
        scheme=scheme_named("fp8_dynamic"),
    ),
    "fp8_dynamic_per_tensor": Recipe(
        text="linears: float8 e4m3 activations and weights per tensor, at run time; no calibration",
        scheme=scheme_named("fp8_dynamic_per_tensor"),
    ),
}


def make_quantizer(recipe: str = "int8", registry: Registry = REGISTRY) -> TableQuantizer:
    """A fresh quantizer for a recipe.

    Raises:
        ConfigError: no recipe has that name; the nearest one is offered.
    """
    if recipe not in RECIPES:
        raise no_recipe("CUDA", recipe, {name: made.scheme for name, made in RECIPES.items()})
    found = RECIPES[recipe]
    return TableQuantizer(
        table_of(registry),
        found.scheme,
        observers=found.observers,
        transforms=(products_as_linears,),
        algorithms=found.algorithms,
        rules=found.rules,
        balances_channels=found.balances_channels,
        computes_in=(torch.float32, torch.bfloat16, torch.float16),
    )
