"""Other names that people have for recipes."""

from collections.abc import Mapping

__all__ = ["ALIASES", "unaliased"]

ALIASES: Mapping[str, str] = {
    "static": "int8",
    "w8a8": "int8",
    "a8w8": "int8",
    "dynamic": "int8_dynamic",
    "int8_dynamic_activation_int8_weight": "int8_dynamic",
    "int8_weight_only": "w8",
    "weight_only": "w8",
    "w8a16": "w8",
    "int4": "w4",
    "int4_weight_only": "w4",
    "w4a16": "w4",
    "w4a8": "a8w4",
    "8da4w": "a8w4_g32",
    "int8_dynamic_activation_int4_weight": "a8w4_g32",
}
"""What a name is called here: torchao's configurations, and names that read weights first."""


def unaliased(recipe: str) -> str:
    """The name that a recipe has here; any other name as it is.

    >>> unaliased("int4")
    'w4'
    """
    return ALIASES.get(recipe, recipe)
