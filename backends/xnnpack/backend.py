"""The XNNPACK backend: importable without ExecuTorch, which only `lower` and `load` need."""

import torch

from pt2e_quant.backends.target.backend import Backend, Lowers
from pt2e_quant.backends.target.policy import place_integer_regions
from pt2e_quant.backends.xnnpack.passes.blocks_as_permutes import blocks_as_permutes
from pt2e_quant.backends.xnnpack.passes.recurrent import recurrent_form
from pt2e_quant.backends.xnnpack.passes.simplify import (
    numbers_as_constants,
    shuffle_depthwise,
    simplify_for_table,
)
from pt2e_quant.backends.xnnpack.passes.volumes import volumes_as_images
from pt2e_quant.backends.xnnpack.policy import POLICY
from pt2e_quant.backends.xnnpack.recipes import RECIPES
from pt2e_quant.backends.xnnpack.table import TABLE
from pt2e_quant.passes.cleanup.activate_before_moves import activate_before_moves
from pt2e_quant.passes.cleanup.einsums_as_products import einsums_as_products
from pt2e_quant.passes.cleanup.experts_as_linears import experts_as_linears
from pt2e_quant.passes.cleanup.join_and_split import split_as_slices, unbind_as_selects
from pt2e_quant.passes.cleanup.linear_forms import products_as_linears
from pt2e_quant.passes.cleanup.remove_identities import broadcast_expanded
from pt2e_quant.passes.cleanup.unroll_loops import unroll_loops
from pt2e_quant.passes.qdq.round_biases_to_accumulator import round_biases_to_accumulator


def _lowering() -> Lowers:
    from pt2e_quant.backends.xnnpack.lower import LOWERING

    return LOWERING


BACKEND = Backend(
    name="xnnpack",
    suffix=".pte",
    extra="xnnpack",
    packages=("executorch",),
    table=TABLE,
    recipes=RECIPES,
    lowering=_lowering,
    policy=POLICY,
    transforms=(
        experts_as_linears,
        unroll_loops,
        volumes_as_images,
        shuffle_depthwise,
        blocks_as_permutes,
        split_as_slices,
        unbind_as_selects,
        einsums_as_products,
        products_as_linears,
        broadcast_expanded,
        simplify_for_table,
        activate_before_moves,
        place_integer_regions(POLICY),
        numbers_as_constants,
    ),
    # The delegate takes biases in float and rounds them to the accumulator's step itself.
    finishing=(round_biases_to_accumulator,),
    recurrent=recurrent_form,
    computes_in=(torch.float32,),
    # It hands constants of a graph to the delegate, and weights are operands of a body.
    float_bodies="ExecuTorch gives the delegate no weights inside control flow: they would be "
    "dequantized in every round",
)
