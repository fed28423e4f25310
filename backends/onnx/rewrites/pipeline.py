"""The rewrites in order, and the clean-up after them."""

from ast import literal_eval
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

_SCOPES = "pkg.torch.onnx.name_scopes"
"""Where the exporter notes a node's module paths, outermost first, then the node."""

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


def apply_rewrites(model: ir.Model) -> dict[str, str]:
    """Bring a model into the form ONNX Runtime fuses; the module path of each value in it."""
    # The branches of an If are graphs of their own.
    graphs = [model.graph, *model.graph.subgraphs()]
    for rewrite in REWRITES:
        for graph in graphs:
            rewrite(graph)
    common.RemoveUnusedNodesPass()(model)
    common.DeduplicateInitializersPass()(model)
    common.TopologicalSortPass()(model)
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
        scopes = literal_eval(node.metadata_props.get(_SCOPES, "[]"))
        for value in node.outputs:
            if value.name is not None and len(scopes) > 1:
                found[value.name] = scopes[-2]
            value.metadata_props.clear()
        node.metadata_props.clear()
    return found
