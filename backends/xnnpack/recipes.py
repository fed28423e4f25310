"""What the recipe names of this backend stand for, and the nearest one to what it cannot run."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from pt2e_quant.backends.xnnpack.gemm_rows import BFLOAT16_SCALES, GROUP_SIZES
from pt2e_quant.core.errors import ConfigError, near
from pt2e_quant.core.formats.format_schemes import format_scheme_named
from pt2e_quant.core.granularity import PerGroup
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.core.schemes import INT8_ACTIVATION, INT8_WEIGHT, Scheme
from pt2e_quant.flow.annotate.observer_choice import ObserverChoice
from pt2e_quant.flow.annotate.rules import QuantRule, RuleKind
from pt2e_quant.graph.op_table import OUT
from pt2e_quant.graph.pipeline import GraphPass
from pt2e_quant.graph.tied_tables import is_embedding, is_tied_linear
from pt2e_quant.observers.static.channel_statistics import ChannelStatisticsObserver
from pt2e_quant.observers.static.predicted_range import PredictedRangeObserver
from pt2e_quant.observers.weights.weight_search import WeightSearch
from pt2e_quant.passes.algorithms.scale_outputs import scale_outputs
from pt2e_quant.passes.algorithms.smooth_quant import smooth_quant

__all__ = ["INT8", "RECIPES", "Recipe", "nearest_recipe", "recipe_named"]

INT8 = Scheme(
    name="int8",
    input=INT8_ACTIVATION,
    output=INT8_ACTIVATION,
    weight=INT8_WEIGHT,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a recipe name stands for.

    Args:
        text: one line of explanation.
        scheme: what every node gets.
        observers: which observers gather ranges.
        algorithms: passes that convert runs on the calibrated graph.
        balances_channels: even out the channels of linears' inputs, from weights alone.
        rules: what some nodes get instead.
    """

    text: str
    scheme: Scheme
    observers: ObserverChoice = field(default_factory=ObserverChoice)
    algorithms: tuple[GraphPass, ...] = ()
    balances_channels: bool = False
    rules: tuple[QuantRule, ...] = ()


_TABLES = QuantRule(kind=RuleKind.GLOBAL, scheme=scheme_named("w8"), where=is_embedding)
"""Embedding tables have int8 rows whatever the linears have: rounding there is in every layer."""


def _without_data(name: str, text: str) -> Recipe:
    """Linears of a scheme that needs no calibration; embedding tables are int8 rows.

    So is the weight of a linear that computes with such a table, the head of a language model:
    rounded to 4 bits it alone costs more than all other linears together.
    """
    # The graph's scales of groups are those that the delegate computes with.
    scheme = scheme_named(name, scales=BFLOAT16_SCALES if "_g" in name else None)
    is_small = scheme.weight is not None and scheme.weight.range[1] < INT8_WEIGHT.range[1]
    search = WeightSearch.MSE if is_small else WeightSearch.MIN_MAX
    whole = scheme_named("w8" if scheme.input is None else "int8_dynamic")
    head = QuantRule(kind=RuleKind.GLOBAL, scheme=whole, where=is_tied_linear)
    return Recipe(
        text=f"{text}; embeddings int8 per row; no calibration",
        scheme=scheme,
        observers=ObserverChoice(search=search),
        rules=(_TABLES, head) if is_small else (_TABLES,),
        balances_channels=True,
    )


RECIPES: Mapping[str, Recipe] = {
    "int8": Recipe(
        text="static int8: activations per tensor, weights per channel, outlier channels scaled",
        scheme=INT8,
        observers=ObserverChoice(
            activation=PredictedRangeObserver,
            by_slot={
                ("linear", "x"): ChannelStatisticsObserver,
                ("linear", OUT): ChannelStatisticsObserver,
            },
        ),
        algorithms=(smooth_quant, scale_outputs),
    ),
    "int8-minmax": Recipe(
        text="static int8: activations per tensor, weights per channel, min-max ranges alone",
        scheme=INT8,
    ),
    "int8_dynamic": _without_data(
        "int8_dynamic", "linears: int8 activations per token at run time, int8 weights per row"
    ),
    "w8": _without_data("w8", "linears: float activations, int8 weights per row"),
    "w4": _without_data("w4", "linears: float activations, int4 weights per row"),
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
}

_SCHEME = re.compile(r"(?:a(?P<a>\d+))?w(?P<w>\d+)(?:_g(?P<g>[1-9]\d*))?")


def recipe_named(name: str) -> Recipe:
    """The recipe of a name.

    Raises:
        ConfigError: there is none; the nearest one is offered, with the reason where the name
            says a scheme that XNNPACK has no kernel for.
    """
    if name in RECIPES:
        return RECIPES[name]
    refused = _refusal(name)
    if refused is None:
        raise ConfigError(f'XNNPACK has no recipe "{name}": {near(name, RECIPES)}')
    reason, nearest = refused
    raise ConfigError(
        f'XNNPACK cannot run "{name}": {reason}',
        fix=f'the nearest recipe it runs is "{nearest}"',
    )


def _refusal(name: str) -> tuple[str, str] | None:
    """Why a scheme has no recipe, and the nearest that has one; None if the name says none."""
    if name == "int8_dynamic_per_tensor":
        return "its linears find the qparams of each row, not of the tensor", "int8_dynamic"
    if (coded := format_scheme_named(name)) is not None and coded.weight is not None:
        granularity = coded.weight.granularity
        size = granularity.group_size if isinstance(granularity, PerGroup) else None
        nearest = nearest_recipe(coded.input is not None, coded.weight.bits, size)
        return "it multiplies integers of 4 or 8 bits or floats of 32 bits", nearest
    found = _SCHEME.fullmatch(name)
    if found is None:
        return None
    bits = int(found["w"])
    group = int(found["g"]) if found["g"] else None
    return _why(found["a"], bits, group), nearest_recipe(found["a"] is not None, bits, group)


def _why(activation: str | None, bits: int, group: int | None) -> str:
    if bits not in (4, 8):
        return "its kernels take weights of 4 or 8 bits"
    if activation not in (None, "8"):
        return f"its kernels take activations of 8 bits, not {activation}"
    if group is None:
        return "it is int8_dynamic"
    if bits == 8:
        return "its int8 weights have one scale per row, not groups"
    if activation is None:
        return "it has no weight-only linear with groups"
    return f"groups are of {', '.join(map(str, GROUP_SIZES))}"


def nearest_recipe(is_dynamic: bool, bits: int, group: int | None) -> str:
    """The recipe nearest to weights of so many bits, with activations of run time or without.

    Args:
        is_dynamic: activations are quantized at run time.
        bits: of a weight.
        group: elements of a row that share a scale; None for rows.
    """
    if bits > 4:
        return "int8_dynamic" if is_dynamic else "w8"
    if group is None:
        return "a8w4" if is_dynamic else "w4"
    return f"a8w4_g{min(GROUP_SIZES, key=lambda size: abs(size - group))}"
