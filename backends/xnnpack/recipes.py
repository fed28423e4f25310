"""The recipes of this backend."""

from functools import partial

from pt2e_quant.backends.target.recipe import (
    CHOICES_BY_DATA,
    Recipe,
    RecipeFamily,
    Recipes,
    without_data,
)
from pt2e_quant.backends.xnnpack.gemm_rows import BFLOAT16_SCALES, GROUP_SIZES
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.core.schemes import INT8_ACTIVATION, INT8_WEIGHT, Scheme
from pt2e_quant.flow.annotate.observer_choice import ObserverChoice
from pt2e_quant.flow.annotate.rules import QuantRule, RuleKind
from pt2e_quant.graph.tied_tables import is_embedding
from pt2e_quant.observers.static.predicted_range import PredictedRangeObserver
from pt2e_quant.passes.algorithms.balance_channels import BalanceChannels
from pt2e_quant.passes.algorithms.own_ranges import OwnRanges
from pt2e_quant.passes.algorithms.run_time_scales import RunTimeScales
from pt2e_quant.passes.algorithms.scale_outputs import ScaleOutputs
from pt2e_quant.passes.algorithms.smooth_quant import SmoothQuant
from pt2e_quant.passes.batch_norm.affines_as_convs import affines_as_convs

INT8 = Scheme(
    name="int8",
    input=INT8_ACTIVATION,
    output=INT8_ACTIVATION,
    weight=INT8_WEIGHT,
)


_TABLES = QuantRule(kind=RuleKind.GLOBAL, scheme=scheme_named("w8"), where=is_embedding)
"""Embedding tables have int8 rows whatever the linears have: rounding there is in every layer."""


def _scheme(name: str) -> Scheme:
    # The graph's scales of groups are those that the delegate computes with.
    return scheme_named(name, scales=BFLOAT16_SCALES if "_g" in name else None)


_without_data = partial(without_data, scheme_of=_scheme, embeddings=(_TABLES,))
_NO_DATA = "; embeddings int8 per row; no calibration"
_DYNAMIC = "linears: int8 activations per token at run time, "

RECIPES = Recipes(
    "XNNPACK",
    (
        Recipe(
            name="int8",
            text="static int8: activations per tensor, weights per channel, outlier channels "
            "scaled; linears between float operators per row at run time",
            scheme=INT8,
            observers=ObserverChoice(activation=PredictedRangeObserver),
            transforms=(affines_as_convs,),
            algorithms=(
                RunTimeScales(),
                BalanceChannels(),
                SmoothQuant(),
                ScaleOutputs(),
                OwnRanges(),
                *CHOICES_BY_DATA,
            ),
        ),
        Recipe(
            name="int8_minmax",
            text="static int8: activations per tensor, weights per channel, min-max ranges alone",
            scheme=INT8,
            transforms=(affines_as_convs,),
        ),
        _without_data("int8_dynamic", f"{_DYNAMIC}int8 weights per row{_NO_DATA}"),
        _without_data("w8", f"linears: float activations, int8 weights per row{_NO_DATA}"),
        _without_data("w4", f"linears: float activations, int4 weights per row{_NO_DATA}"),
        RecipeFamily(
            grammar=f"a8w4[_g<{','.join(map(str, GROUP_SIZES))}>]",
            text=f"{_DYNAMIC}int4 weights per row or in groups{_NO_DATA}",
            make=_without_data,
        ),
    ),
)
