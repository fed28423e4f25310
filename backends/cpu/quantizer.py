"""Recipes of the CPU backend, and the quantizers made from them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch.fx import GraphModule

from pt2e_quant.backends.cpu.place_by_speed import place_by_speed
from pt2e_quant.backends.cpu.placement import place_movers
from pt2e_quant.backends.cpu.table import REGISTRY, table_of
from pt2e_quant.backends.no_recipe import no_recipe
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.core.recurrent_ops import Rounding
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.core.schemes import INT8_WEIGHT, UINT8_ACTIVATION, Scheme
from pt2e_quant.flow.annotate.observer_choice import ObserverChoice
from pt2e_quant.flow.annotate.rules import QuantRule, RuleKind
from pt2e_quant.flow.annotate.table_quantizer import TableQuantizer
from pt2e_quant.graph.pipeline import GraphPass, PassResult, graph_pass
from pt2e_quant.graph.tied_tables import is_tied_linear
from pt2e_quant.kernels.int4_linear.op import GROUP_SIZES
from pt2e_quant.kernels.onednn.exact_products import onednn_is_exact
from pt2e_quant.kernels.recurrent_layer.cpu import recurrent_form
from pt2e_quant.kernels.registry import Registry
from pt2e_quant.observers.static.channel_statistics import ChannelStatisticsObserver
from pt2e_quant.observers.static.predicted_range import PredictedRangeObserver
from pt2e_quant.observers.weights.weight_search import WeightSearch
from pt2e_quant.passes.algorithms.smooth_quant import smooth_quant
from pt2e_quant.passes.attention.narrow_attention import narrow_attention
from pt2e_quant.passes.cleanup.products_as_linears import products_as_linears
from pt2e_quant.passes.recurrent.split_recurrent import LayerSizes

__all__ = ["INT8", "INT8_REDUCED", "RECIPES", "REDUCED_NOTE", "Recipe", "make_quantizer"]

_REDUCED = replace(UINT8_ACTIVATION, quant_min=0, quant_max=127)

INT8 = Scheme(
    name="int8", input=UINT8_ACTIVATION, output=UINT8_ACTIVATION, weight=INT8_WEIGHT, bias=None
)
INT8_REDUCED = replace(INT8, name="int8_reduced", input=_REDUCED, output=_REDUCED)
"""Activations of 7 bits: exact sums also without VNNI, at half the resolution."""

REDUCED_NOTE = (
    "activations are quantized to 7 bits, [0, 127]: this machine's oneDNN has no VNNI and would "
    "cut sums of 8-bit products off"
)


@graph_pass()
def note_reduced_range(gm: GraphModule) -> PassResult:
    """Say in the provenance that activations have 7 bits, and why."""
    provenance_of(gm).notes.append(REDUCED_NOTE)
    return PassResult(changed=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a recipe name stands for.

    Args:
        text: one line of explanation.
        scheme: what every node gets; None lets the machine decide.
        observers: which observers gather ranges.
        transforms: passes that prepare runs before it annotates.
        algorithms: passes that convert runs on the calibrated graph.
        rules: what some nodes get instead.
        balances_channels: even out the channels of linears' inputs, from weights alone.
    """

    text: str
    scheme: Scheme | None
    observers: ObserverChoice
    transforms: tuple[GraphPass, ...] = ()
    algorithms: tuple[GraphPass, ...] = ()
    rules: tuple[QuantRule, ...] = ()
    balances_channels: bool = False


_BEST = ObserverChoice(
    activation=PredictedRangeObserver,
    by_slot={
        (row, "x"): ChannelStatisticsObserver
        for row in ("linear", "linear_activation", "linear_add")
    },
)


def _without_data(name: str, text: str) -> Recipe:
    scheme = scheme_named(name)
    is_small = scheme.weight is not None and scheme.weight.bits < 8
    head = scheme_named("w8" if scheme.input is None else "int8_dynamic")
    # A language model's head with tied tables: rounded to 4 bits it alone costs more than the rest.
    rule = QuantRule(kind=RuleKind.GLOBAL, scheme=head, where=is_tied_linear)
    return Recipe(
        text=f"linears: {text}; no calibration",
        scheme=scheme,
        observers=ObserverChoice(search=WeightSearch.MSE if is_small else WeightSearch.MIN_MAX),
        rules=(rule,) if is_small else (),
        balances_channels=True,
    )


RECIPES: Mapping[str, Recipe] = {
    "int8": Recipe(
        text="static: uint8 activations per tensor, int8 weights per output channel; 7-bit "
        "activations where a trial product shows that 8 bits saturate (no VNNI)",
        scheme=None,
        observers=_BEST,
        algorithms=(smooth_quant,),
    ),
    "int8-reduced": Recipe(
        text="the same with 7-bit activations whatever the machine: the artifact runs exactly on "
        "any x86 CPU",
        scheme=INT8_REDUCED,
        observers=_BEST,
        algorithms=(smooth_quant,),
    ),
    "int8-full": Recipe(
        text="the same with 8-bit activations whatever the machine: for one with VNNI",
        scheme=INT8,
        observers=_BEST,
        algorithms=(smooth_quant,),
    ),
    "int8_bf16": Recipe(
        text="int8, and attention, which stays float, in bfloat16: for CPUs with AMX or "
        "AVX512-BF16",
        scheme=None,
        observers=_BEST,
        transforms=(narrow_attention,),
        algorithms=(smooth_quant,),
    ),
    "int8_dynamic": Recipe(
        text="linears: int8 activations per token at run time, int8 weights per row; no "
        "calibration; exact sums on any CPU",
        scheme=scheme_named("int8_dynamic"),
        observers=ObserverChoice(),
        balances_channels=True,
    ),
    "a8w4": _without_data(
        "a8w4", "int8 activations per token at run time, int4 weights per row, run as int8 ones"
    ),
    "w8": _without_data("w8", "float32 activations, int8 weights per row"),
    "w4": _without_data("w4", "float32 activations, int4 weights per row"),
    **{
        f"w4_g{size}": _without_data(
            f"w4_g{size}", f"float32 activations, int4 weights in groups of {size}"
        )
        for size in GROUP_SIZES
    },
}


def _recurrent_form(sizes: LayerSizes, rounds_activations: bool) -> Rounding | str:
    return recurrent_form(
        sizes.cell,
        sizes.hidden,
        has_projection=sizes.has_projection,
        rounds_activations=rounds_activations,
    )


def make_quantizer(recipe: str = "int8", registry: Registry = REGISTRY) -> TableQuantizer:
    """A fresh quantizer for a recipe.

    Raises:
        ConfigError: no recipe has that name; the nearest one is offered.
    """
    if recipe not in RECIPES:
        raise no_recipe("CPU", recipe, {name: r.scheme or INT8 for name, r in RECIPES.items()})
    found = RECIPES[recipe]
    is_forced = found.scheme is None and not onednn_is_exact()
    scheme = found.scheme or (INT8_REDUCED if is_forced else INT8)
    forced = (note_reduced_range,) if is_forced else ()
    table = table_of(registry)
    is_static = scheme.input is not None and not scheme.input.is_dynamic
    timed = (place_by_speed(table),) if is_static else ()
    return TableQuantizer(
        table,
        scheme,
        observers=found.observers,
        transforms=(products_as_linears, *found.transforms, *timed, place_movers, *forced),
        algorithms=found.algorithms,
        rules=found.rules,
        recurrent=_recurrent_form,
        balances_channels=found.balances_channels,
        computes_in=(torch.float32,),
    )
