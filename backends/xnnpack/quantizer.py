"""The quantizers of this backend: its table, and a scheme and observers for each recipe."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pt2e_quant.backends.xnnpack.movers import unbind_as_selects
from pt2e_quant.backends.xnnpack.placement import place_elementwise
from pt2e_quant.backends.xnnpack.simplify import numbers_as_constants, simplify_for_table
from pt2e_quant.backends.xnnpack.table import TABLE
from pt2e_quant.core.errors import ConfigError, near
from pt2e_quant.core.schemes import INT8_ACTIVATION, INT8_WEIGHT, Scheme
from pt2e_quant.flow.observer_choice import ObserverChoice
from pt2e_quant.flow.op_table import OUT
from pt2e_quant.flow.table_quantizer import TableQuantizer
from pt2e_quant.graph.pipeline import GraphPass
from pt2e_quant.observers.channel_statistics import ChannelStatisticsObserver
from pt2e_quant.observers.predicted_range import PredictedRangeObserver
from pt2e_quant.passes.scale_outputs import scale_outputs
from pt2e_quant.passes.smooth_channels import smooth_channels
from pt2e_quant.passes.snap_biases import snap_biases
from pt2e_quant.passes.split_as_slices import split_as_slices

__all__ = ["INT8", "RECIPES", "Recipe", "make_quantizer"]

INT8 = Scheme(
    name="int8",
    input=INT8_ACTIVATION,
    output=INT8_ACTIVATION,
    weight=INT8_WEIGHT,
)

TRANSFORMS: tuple[GraphPass, ...] = (
    split_as_slices,
    unbind_as_selects,
    simplify_for_table,
    place_elementwise,
    numbers_as_constants,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a recipe name stands for.

    Args:
        text: one line of explanation.
        scheme: what every node gets.
        observers: which observers gather ranges.
        algorithms: passes that convert runs on the calibrated graph.
    """

    text: str
    scheme: Scheme
    observers: ObserverChoice = field(default_factory=ObserverChoice)
    algorithms: tuple[GraphPass, ...] = ()


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
        algorithms=(smooth_channels, scale_outputs),
    ),
    "int8-minmax": Recipe(
        text="static int8: activations per tensor, weights per channel, min-max ranges alone",
        scheme=INT8,
    ),
}


def make_quantizer(recipe: str) -> TableQuantizer:
    """A fresh quantizer.

    Raises:
        ConfigError: no recipe has that name.
    """
    if recipe not in RECIPES:
        raise ConfigError(f'XNNPACK has no recipe "{recipe}": {near(recipe, RECIPES)}')
    found = RECIPES[recipe]
    return TableQuantizer(
        TABLE,
        found.scheme,
        observers=found.observers,
        transforms=TRANSFORMS,
        algorithms=found.algorithms,
        # The delegate takes biases in float and rounds them to the accumulator's step itself.
        finishing=(snap_biases,),
    )
