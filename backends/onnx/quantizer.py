"""Quantizers of the ONNX backend, made from its recipes and its op table."""

import torch

from pt2e_quant.backends.onnx.low_bit_rows import GROUP_SIZES
from pt2e_quant.backends.onnx.passes.recurrent import recurrent_form
from pt2e_quant.backends.onnx.recipes import RECIPES
from pt2e_quant.backends.onnx.table import TABLE
from pt2e_quant.core.errors import ConfigError, near
from pt2e_quant.core.formats.number_formats import NumberFormat
from pt2e_quant.core.granularity import PerGroup
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.core.schemes import Scheme, TensorScheme
from pt2e_quant.flow.annotate.rules import QuantRule, RuleKind
from pt2e_quant.flow.annotate.table_quantizer import TableQuantizer

__all__ = ["make_quantizer", "weight_only_of"]


def make_quantizer(recipe: str = "int8") -> TableQuantizer:
    """A fresh quantizer for a recipe.

    Raises:
        ConfigError: no recipe has that name; the nearest one is offered.
    """
    if recipe not in RECIPES:
        raise _unknown(recipe)
    found = RECIPES[recipe]
    return TableQuantizer(
        TABLE,
        found.scheme,
        observers=found.observers,
        rules=[
            QuantRule(kind=RuleKind.GLOBAL, scheme=scheme, where=where)
            for where, scheme in found.special
        ],
        transforms=found.transforms,
        algorithms=found.algorithms,
        recurrent=recurrent_form,
        balances_channels=found.balances_channels,
        computes_in=(torch.float32,),
    )


def weight_only_of(form: NumberFormat, weight: TensorScheme | None = None) -> str:
    """The recipe that keeps weights in a format, in this very form if there is one."""
    found = {r.name: r.scheme.weight for r in RECIPES.values() if r.scheme.weight is not None}
    same = [name for name, scheme in found.items() if scheme.format == form]
    return next((name for name in same if found[name] == weight), same[0])


def _unknown(recipe: str) -> ConfigError:
    """What to say of a name that is no recipe: a scheme without kernels, or no scheme at all."""
    try:
        scheme = scheme_named(recipe)
    except ConfigError:
        return ConfigError(f'ONNX Runtime has no recipe "{recipe}": {near(recipe, RECIPES)}')
    nearest = _nearest(scheme)
    return ConfigError(
        f'ONNX Runtime has no recipe for scheme "{recipe}"',
        fix=f'the nearest it runs is "{nearest}": {RECIPES[nearest].text}',
    )


def _nearest(scheme: Scheme) -> str:
    """The recipe with as many bits or more, and groups as small or smaller where there are any.

    To activations in small floats it is that of the same weights with float activations.
    """
    if scheme.weight is not None and scheme.weight.format is not None:
        return weight_only_of(scheme.weight.format, scheme.weight)
    if scheme.input is not None and not scheme.input.is_dynamic:
        return "int8"
    weight = scheme.weight
    assert weight is not None  # every scheme of a name has weights
    if weight.bits > 4:
        return "w8" if scheme.input is None else "int8_dynamic"
    base = "w4" if scheme.input is None else "a8w4"
    if not isinstance(weight.granularity, PerGroup):
        return base
    wanted = weight.granularity.group_size
    sizes = [size for size in GROUP_SIZES if f"{base}_g{size}" in RECIPES]
    return f"{base}_g{max((s for s in sizes if s <= wanted), default=sizes[0])}"
