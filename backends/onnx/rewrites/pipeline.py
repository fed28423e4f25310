"""The rewrites in order, and the clean-up after them."""

from collections.abc import Callable

import onnx_ir as ir
from onnx_ir.passes import common

from pt2e_quant.backends.onnx.rewrites.absorb_clips import absorb_clips
from pt2e_quant.backends.onnx.rewrites.fold_casts import fold_casts
from pt2e_quant.backends.onnx.rewrites.gather_integers import gather_integers
from pt2e_quant.backends.onnx.rewrites.integer_bias import integer_bias
from pt2e_quant.backends.onnx.rewrites.keep_layer_norm import keep_layer_norm
from pt2e_quant.backends.onnx.rewrites.relu_as_max import relu_as_max
from pt2e_quant.backends.onnx.rewrites.run_on_integers import (
    cancel_requantize,
    run_on_integers,
    subtract_by_add,
)
from pt2e_quant.backends.onnx.rewrites.unsigned_activations import unsigned_activations
from pt2e_quant.backends.onnx.rewrites.widen_bias import widen_bias

__all__ = ["REWRITES", "apply_rewrites"]

REWRITES: tuple[Callable[[ir.Graph], int], ...] = (
    fold_casts,
    unsigned_activations,
    absorb_clips,
    subtract_by_add,
    run_on_integers,
    cancel_requantize,
    gather_integers,
    widen_bias,
    integer_bias,
    relu_as_max,
    keep_layer_norm,
)


def apply_rewrites(model: ir.Model) -> dict[str, int]:
    """Bring a model into the form ONNX Runtime fuses; how often each rewrite fired."""
    # The branches of an If are graphs of their own.
    graphs = [model.graph, *model.graph.subgraphs()]
    counts = {rewrite.__name__: sum(map(rewrite, graphs)) for rewrite in REWRITES}
    common.RemoveUnusedNodesPass()(model)
    common.DeduplicateInitializersPass()(model)
    common.TopologicalSortPass()(model)
    _drop_origins(model.graph)
    return counts


def _drop_origins(graph: ir.Graph) -> None:
    """The exporter's notes on every node (source, module classes) are larger than a small model.

    Provenance, which travels in the file, says where each tensor comes from.
    """
    graph.metadata_props.clear()
    for value in (*graph.inputs, *graph.initializers.values()):
        value.metadata_props.clear()
    for node in graph:
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()
