"""The rewrites in order, and the clean-up after them."""

from ast import literal_eval
from collections.abc import Callable
from typing import TypeAlias

import onnx_ir as ir
from onnx_ir.passes import common

from pt2e_quant.backends.onnx.rewrites.biases import integer_bias, widen_bias
from pt2e_quant.backends.onnx.rewrites.block_kernels import (
    look_up_blocks,
    look_up_portable,
    multiply_blocks,
    transpose_blocks,
)
from pt2e_quant.backends.onnx.rewrites.dequantize_once import dequantize_once, gather_integers
from pt2e_quant.backends.onnx.rewrites.expand_per_token import expand_per_token
from pt2e_quant.backends.onnx.rewrites.integer_products import (
    multiply_one_row,
    multiply_per_tensor,
    multiply_per_token,
    multiply_per_token_portable,
    scale_products,
)
from pt2e_quant.backends.onnx.rewrites.layouts import drop_reshapes, join_reshapes, write_rows
from pt2e_quant.backends.onnx.rewrites.prevent_fusions import (
    keep_layer_norm,
    pool_in_float,
    relu_as_max,
)
from pt2e_quant.backends.onnx.rewrites.run_on_integers import (
    absorb_clips,
    cancel_requantize,
    fold_casts,
    run_on_integers,
    subtract_by_add,
    turn_shared_weights,
    unsigned_activations,
)
from pt2e_quant.backends.onnx.rewrites.split_results import (
    split_results,
    split_results_portable,
)
from pt2e_quant.backends.onnx.rewrites.write_formats import write_formats
from pt2e_quant.backends.onnx.rewrites.write_recurrent import (
    write_recurrent,
    write_recurrent_portable,
)
from pt2e_quant.backends.onnx.translate.marks import MARKS
from pt2e_quant.backends.onnx.validate_rewrites import SCOPES, RewriteValidation
from pt2e_quant.backends.onnx.values import MICROSOFT

Rewrite: TypeAlias = Callable[[ir.Graph], int]

_STATIC: tuple[Rewrite, ...] = (
    fold_casts,
    unsigned_activations,
    absorb_clips,
    subtract_by_add,
    run_on_integers,
    cancel_requantize,
)
_LAST: tuple[Rewrite, ...] = (
    write_formats,
    expand_per_token,
    gather_integers,
    dequantize_once,
    turn_shared_weights,
    widen_bias,
    integer_bias,
    relu_as_max,
    pool_in_float,
    keep_layer_norm,
    drop_reshapes,
    join_reshapes,
    write_rows,
    scale_products,
)
REWRITES = (
    *_STATIC,
    write_recurrent,
    multiply_blocks,
    look_up_blocks,
    multiply_per_tensor,
    multiply_one_row,
    multiply_per_token,
    split_results,
    *_LAST,
)
PORTABLE_REWRITES = (
    *_STATIC,
    write_recurrent_portable,
    look_up_portable,
    multiply_per_tensor,
    multiply_one_row,
    multiply_per_token_portable,
    transpose_blocks,
    split_results_portable,
    *_LAST,
)
"""Without ONNX Runtime's own operators."""


def apply_rewrites(
    model: ir.Model,
    *,
    portable: bool = False,
    validation: RewriteValidation | None = None,
) -> dict[str, str]:
    """Bring a model into the form ONNX Runtime fuses; the module path of each value in it.

    `validation` is shown the model after each rewrite.
    """
    # The branches of an If are graphs of their own.
    graphs = [model.graph, *model.graph.subgraphs()]
    for rewrite in PORTABLE_REWRITES if portable else REWRITES:
        fired = sum([rewrite(graph) for graph in graphs])
        if validation is not None and fired:
            validation.after(rewrite.__name__, model)
    common.RemoveUnusedNodesPass()(model)
    common.DeduplicateInitializersPass()(model)
    common.TopologicalSortPass()(model)
    model.opset_imports.pop(MARKS, None)
    if any(node.domain == MICROSOFT for graph in graphs for node in graph):
        model.opset_imports[MICROSOFT] = 1
    return {name: path for graph in graphs for name, path in _take_origins(graph).items()}


def _take_origins(graph: ir.Graph) -> dict[str, str]:
    """Take the exporter's notes off every node; they are larger than a small model.

    Provenance, which travels in the file, says where each tensor comes from.
    """
    found: dict[str, str] = {}
    graph.metadata_props.clear()
    for value in (*graph.inputs, *graph.initializers.values()):
        value.metadata_props.clear()
    for node in graph:
        scopes = literal_eval(node.metadata_props.get(SCOPES, "[]"))
        for value in node.outputs:
            if value.name is not None and len(scopes) > 1:
                found[value.name] = scopes[-2]
            value.metadata_props.clear()
        node.metadata_props.clear()
    return found
