"""Recipes of the ONNX backend: a name, and the schemes, observers and passes it stands for."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch.fx import Node

from pt2e_quant.backends.onnx.code_rows import WEIGHT_FORMATS
from pt2e_quant.backends.onnx.passes.shuffle_upsampling import shuffle_upsampling
from pt2e_quant.backends.onnx.placement import place_light
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.core.schemes import (
    BIAS_INT32,
    INT8_WEIGHT,
    INT8_WEIGHT_ROWS,
    UINT8_ACTIVATION,
    Scheme,
)
from pt2e_quant.flow.annotate.observer_choice import ObserverChoice
from pt2e_quant.graph.pipeline import GraphPass
from pt2e_quant.graph.tied_tables import (
    is_tied_embedding,
    is_tied_linear,
    is_untied_embedding,
)
from pt2e_quant.observers.static.channel_statistics import ChannelStatisticsObserver
from pt2e_quant.observers.static.predicted_range import PredictedRangeObserver
from pt2e_quant.observers.weights.weight_search import WeightSearch
from pt2e_quant.passes.algorithms.smooth_quant import smooth_quant
from pt2e_quant.passes.attention.decompose_attention import decompose_attention
from pt2e_quant.passes.cleanup.products_as_linears import products_as_linears
from pt2e_quant.passes.cleanup.remove_noop_expand import remove_noop_expand
from pt2e_quant.passes.cleanup.split_as_slices import split_as_slices

__all__ = ["INT8", "RECIPES", "Recipe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a recipe name stands for.

    Args:
        name: as in `quantizer(name)`.
        text: one line of explanation.
        scheme: what every node gets.
        special: schemes of the nodes for which a function says so; they win over `scheme`.
        observers: which observers gather ranges.
        transforms: passes on the exported graph.
        algorithms: passes that convert runs on the calibrated graph.
        balances_channels: even out the channels of linears' inputs, from weights alone.
    """

    name: str
    text: str
    scheme: Scheme
    special: tuple[tuple[Callable[[Node], bool], Scheme], ...] = ()
    observers: ObserverChoice = field(default_factory=ObserverChoice)
    transforms: tuple[GraphPass, ...] = ()
    algorithms: tuple[GraphPass, ...] = ()
    balances_channels: bool = False


INT8 = Scheme(
    name="int8",
    input=UINT8_ACTIVATION,
    output=UINT8_ACTIVATION,
    weight=INT8_WEIGHT,
    bias=BIAS_INT32,
)
"""uint8 activations: ONNX Runtime on x86 runs them about five times faster than int8 ones."""

_EMBEDDING_ROWS = Scheme(name="w8", input=None, output=None, weight=INT8_WEIGHT_ROWS)
_ATTENTION = (decompose_attention, remove_noop_expand)
_SEARCHED = ObserverChoice(search=WeightSearch.MSE)


def _without_data(name: str, text: str, *, symmetric: bool = True) -> Recipe:
    """A recipe that needs no calibration: its scheme's name says all.

    Embedding tables get int8 rows, which cost a tenth of what 4-bit ones do in error. So does a
    linear that computes with such a table, the head of a language model: rounded to 4 bits it
    alone costs more than all other linears together.
    """
    scheme = scheme_named(name, symmetric=symmetric)
    head = scheme_named("w8" if scheme.input is None else "int8_dynamic")
    weight = scheme.weight
    is_small = weight is not None and (weight.bits < 8 or weight.format is not None)
    return Recipe(
        name=name,
        text=text,
        scheme=scheme,
        special=(
            (is_untied_embedding, _EMBEDDING_ROWS),
            (is_tied_embedding, scheme_named("w8")),
            *(((is_tied_linear, head),) if is_small else ()),
        ),
        observers=_SEARCHED,
        transforms=(*_ATTENTION, products_as_linears),
        balances_channels=True,
    )


def _four_bit() -> list[Recipe]:
    found = []
    for group in ("", "_g32", "_g64", "_g128"):
        scales = f"in groups of {group[2:]}" if group else "per output channel"
        weights = f"uint4 weights {scales}, least squared error; int8 embeddings; "
        found.append(_without_data(f"w4{group}", f"{weights}computed in float32", symmetric=False))
        found.append(
            _without_data(
                f"a8w4{group}",
                f"{weights}activations rounded to int8 at run time, inside the kernel",
                symmetric=False,
            )
        )
    return found


def _codes() -> list[Recipe]:
    """Weights in any codes: for small files; ONNX Runtime computes with what they decode to."""
    integers = [f"w{bits}{group}" for bits in (2, 3, 5, 6, 7) for group in ("", "_g32", "_g128")]
    return [
        _without_data(
            name,
            f"{scheme_named(name).weight} in the file, decoded once at load; int8 embeddings; "
            "computed in float32",
        )
        for name in (*integers, *WEIGHT_FORMATS)
    ]


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
            transforms=(*_ATTENTION, split_as_slices, shuffle_upsampling, place_light),
            algorithms=(smooth_quant,),
        ),
        _without_data(
            "int8_dynamic",
            "linears: int8 activations per token at run time, int8 weights per output channel",
        ),
        _without_data(
            "int8_dynamic_per_tensor",
            "linears: uint8 activations per tensor at run time (ONNX Runtime's own dynamic "
            "scheme, the fastest), int8 weights per output channel",
        ),
        _without_data(
            "w8", "int8 weights per output channel in the file, dequantized once at load"
        ),
        *_four_bit(),
        *_codes(),
    )
}
