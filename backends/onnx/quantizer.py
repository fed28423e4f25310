"""Recipes of the ONNX backend, and the quantizers made from them."""

from dataclasses import dataclass, field

from pt2e_quant.backends.onnx.placement import place_light
from pt2e_quant.backends.onnx.shuffle_upsampling import shuffle_upsampling
from pt2e_quant.backends.onnx.table import TABLE
from pt2e_quant.core.errors import ConfigError, near
from pt2e_quant.core.schemes import BIAS_INT32, INT8_WEIGHT, UINT8_ACTIVATION, Scheme
from pt2e_quant.flow.observer_choice import ObserverChoice
from pt2e_quant.flow.table_quantizer import TableQuantizer
from pt2e_quant.graph.pipeline import GraphPass
from pt2e_quant.observers.channel_statistics import ChannelStatisticsObserver
from pt2e_quant.observers.predicted_range import PredictedRangeObserver
from pt2e_quant.passes.decompose_attention import decompose_attention
from pt2e_quant.passes.remove_noop_expand import remove_noop_expand
from pt2e_quant.passes.smooth_channels import smooth_channels
from pt2e_quant.passes.split_as_slices import split_as_slices

__all__ = ["INT8", "RECIPES", "Recipe", "make_quantizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a recipe name stands for.

    Args:
        name: as in `quantizer(name)`.
        text: one line of explanation.
        scheme: what every node gets.
        observers: which observers gather ranges.
        algorithms: passes that convert runs on the calibrated graph.
    """

    name: str
    text: str
    scheme: Scheme
    observers: ObserverChoice = field(default_factory=ObserverChoice)
    algorithms: tuple[GraphPass, ...] = ()


TRANSFORMS: tuple[GraphPass, ...] = (
    decompose_attention,
    remove_noop_expand,
    split_as_slices,
    shuffle_upsampling,
    place_light,
)

INT8 = Scheme(
    name="int8",
    input=UINT8_ACTIVATION,
    output=UINT8_ACTIVATION,
    weight=INT8_WEIGHT,
    bias=BIAS_INT32,
)
"""uint8 activations: ONNX Runtime on x86 runs them about five times faster than int8 ones."""

RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="int8",
            text="static: uint8 activations per tensor, int8 weights per output channel",
            scheme=INT8,
            observers=ObserverChoice(
                activation=PredictedRangeObserver,
                by_slot={("linear", "x"): ChannelStatisticsObserver},
            ),
            algorithms=(smooth_channels,),
        ),
    )
}


def make_quantizer(recipe: str = "int8") -> TableQuantizer:
    """A fresh quantizer for a recipe.

    Raises:
        ConfigError: no recipe has that name; near names are offered.
    """
    if recipe not in RECIPES:
        raise ConfigError(f'ONNX Runtime has no recipe "{recipe}": {near(recipe, RECIPES)}')
    found = RECIPES[recipe]
    return TableQuantizer(
        TABLE,
        found.scheme,
        observers=found.observers,
        transforms=TRANSFORMS,
        algorithms=found.algorithms,
    )
