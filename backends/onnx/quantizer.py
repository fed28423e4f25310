"""Recipes of the ONNX backend, and the quantizers made from them."""

from dataclasses import dataclass

from pt2e_quant.backends.onnx.table import TABLE
from pt2e_quant.core.errors import ConfigError, near
from pt2e_quant.core.schemes import BIAS_INT32, INT8_WEIGHT, UINT8_ACTIVATION, Scheme
from pt2e_quant.flow.table_quantizer import TableQuantizer

__all__ = ["INT8", "RECIPES", "Recipe", "make_quantizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A named way to quantize."""

    name: str
    text: str
    scheme: Scheme


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
    return TableQuantizer(TABLE, RECIPES[recipe].scheme)
