"""The rewrites in order, and those that tidy up: reshapes, rows written without a transpose."""

from ast import literal_eval
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from pt2e_quant.backends.onnx.rewrites.block_kernels import (
    look_up_blocks,
    look_up_portable,
    multiply_blocks,
    transpose_blocks,
)
from pt2e_quant.backends.onnx.rewrites.blocks_as_depth import blocks_as_depth
from pt2e_quant.backends.onnx.rewrites.dequantize_once import dequantize_once, gather_integers
from pt2e_quant.backends.onnx.rewrites.expand_per_token import expand_per_token
from pt2e_quant.backends.onnx.rewrites.guide_fusions import (
    integer_bias,
    join_silu,
    keep_layer_norm,
    keep_weights_float,
    pool_in_float,
    quantize_behind_pool,
    relu_as_max,
    widen_bias,
)
from pt2e_quant.backends.onnx.rewrites.integer_products import (
    multiply_one_row,
    multiply_per_tensor,
    multiply_per_token,
    multiply_per_token_portable,
    scale_products,
)
from pt2e_quant.backends.onnx.rewrites.narrow_indices import narrow_indices
from pt2e_quant.backends.onnx.rewrites.rows_of_experts import split_rows
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
from pt2e_quant.backends.onnx.rewrites.supported_dtypes import use_supported_dtypes
from pt2e_quant.backends.onnx.rewrites.write_formats import write_formats
from pt2e_quant.backends.onnx.rewrites.write_recurrent import (
    write_recurrent,
    write_recurrent_portable,
)
from pt2e_quant.backends.onnx.translate.marks import MARKS
from pt2e_quant.backends.onnx.validate_rewrites import SCOPES, RewriteValidation
from pt2e_quant.backends.onnx.values import (
    MICROSOFT,
    call,
    constant,
    make_constant,
    only_consumer,
    permutation,
    redirect,
    remove_unread,
    sizes,
)


def drop_reshapes(graph: ir.Graph) -> int:
    """Let the readers of a Reshape to the same sizes read its input.

    Before:  Reshape(x[B, T, D], [B, T, D])
    After:   x
    """
    changed = 0
    for node in [n for n in graph if n.op_type == "Reshape"]:
        source, output = node.inputs[0], node.outputs[0]
        before, after = sizes(source), sizes(output)
        if source is None or output.shape is None or output.is_graph_output():
            continue
        if before != after or source.shape is None or None in before:
            continue
        redirect(output, source)
        graph.remove(node, safe=True)
        changed += 1
    return changed


def join_reshapes(graph: ir.Graph) -> int:
    """Reshape at once what is reshaped twice, where the second says all sizes itself.

    A size of 0 would be taken from the first one's result.

    Before:  Reshape(Reshape(x, [2, 17, 64]), [2, -1, 4, 16])
    After:   Reshape(x, [2, -1, 4, 16])
    """
    changed = 0
    for node in [n for n in graph if n.op_type == "Reshape"]:
        between, shape = node.inputs[0], constant(node.inputs[1])
        first = between.producer() if between is not None else None
        if first is None or first.op_type != "Reshape" or shape is None or 0 in shape:
            continue
        node.replace_input_with(0, first.inputs[0])
        remove_unread(graph, [first])
        changed += 1
    return changed


def write_rows(graph: ir.Graph) -> int:
    """Give ScatterND the places of rows along an inner axis, in place of turning it outwards.

    `index_copy` into a KV cache is exported so: the whole cache is copied three times where one
    copy will do. The places are made once for all tensors of one shape.

    Before:  Transpose(ScatterND(Transpose(x), i[T, 1], Transpose(y))),   rows i of axis 2
    After:   ScatterND(x, places[B, H, T, 3], y),   x[B, H, S, D], places[b, h, t] = (b, h, i[t])
    """
    made: dict[tuple[ir.Value, tuple[int, ...]], ir.Value] = {}
    changed = 0
    for node in [n for n in graph if n.op_type == "ScatterND" and "reduction" not in n.attributes]:
        turned, index, rows = node.inputs
        back = only_consumer(node.outputs[0])
        source = _turned(turned)
        if back is None or index is None or rows is None or source is None:
            continue
        x, perm = source
        inverse = [perm.index(axis) for axis in range(len(perm))]
        leading = tuple(size for size in sizes(x)[: perm[0]] if isinstance(size, int))
        if permutation(back) != inverse or not _is_column(index) or len(leading) < perm[0]:
            continue
        if (index, leading) not in made:
            made[index, leading] = _places(graph, node, index, leading)
        output = back.outputs[0]
        inputs = [x, made[index, leading], _upright(node, rows, inverse)]
        redirect(output, call(node, "ScatterND", inputs, name=f"{output.name}_rows", like=output))
        remove_unread(graph, [back])
        changed += 1
    return changed


def _turned(value: ir.Value | None) -> tuple[ir.Value, list[int]] | None:
    """The input and the order of a Transpose that moves one inner axis to the front.

    Not the last axis: single elements are no rows.
    """
    node = value.producer() if value is not None else None
    perm = permutation(node) if node is not None else None
    source = node.inputs[0] if node is not None else None
    if perm is None or source is None or len(sizes(source)) != len(perm):
        return None
    is_moved = perm[1:] == [axis for axis in range(len(perm)) if axis != perm[0]]
    return (source, perm) if is_moved and 0 < perm[0] < len(perm) - 1 else None


def _is_column(index: ir.Value) -> bool:
    """True if indices are [T, 1]: each names a row of the first axis."""
    return len(sizes(index)) == 2 and sizes(index)[1] == 1


def _places(graph: ir.Graph, node: ir.Node, index: ir.Value, leading: tuple[int, ...]) -> ir.Value:
    """int64 [*leading, T, axis + 1]: where each row goes."""
    axis, base = len(leading), f"{index.name}_of_{'_'.join(map(str, leading))}"
    last = np.array([0] * axis + [1], np.int64)
    first = np.zeros((*leading, 1, axis + 1), np.int64)
    first[..., 0, :axis] = np.moveaxis(np.indices(leading), 0, -1)
    column = [index, make_constant(graph, f"{base}_last", last)]
    spread = [call(node, "Mul", column, name=f"{base}_row"), make_constant(graph, base, first)]
    return call(node, "Add", spread, name=f"{base}_places")


def _upright(node: ir.Node, rows: ir.Value, inverse: list[int]) -> ir.Value:
    """The rows in the order of the tensor's own axes; one Transpose at most."""
    producer = rows.producer()
    first = permutation(producer) if producer is not None else None
    perm = inverse
    if producer is not None and first is not None and producer.inputs[0] is not None:
        rows, perm = producer.inputs[0], [first[axis] for axis in inverse]
    if perm == sorted(perm):
        return rows
    return call(node, "Transpose", [rows], {"perm": perm}, name=f"{node.outputs[0].name}_upright")


Rewrite: TypeAlias = Callable[[ir.Graph], int]

_STATIC: tuple[Rewrite, ...] = (
    fold_casts,
    unsigned_activations,
    absorb_clips,
    subtract_by_add,
    run_on_integers,
    blocks_as_depth,
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
    quantize_behind_pool,
    keep_weights_float,
    keep_layer_norm,
    drop_reshapes,
    join_reshapes,
    write_rows,
    scale_products,
    use_supported_dtypes,
    narrow_indices,
)
REWRITES = (
    *_STATIC,
    write_recurrent,
    multiply_blocks,
    look_up_blocks,
    multiply_per_tensor,
    multiply_one_row,
    split_rows,
    multiply_per_token,
    split_results,
    join_silu,
    *_LAST,
)
PORTABLE_REWRITES = (
    *_STATIC,
    write_recurrent_portable,
    look_up_portable,
    multiply_per_tensor,
    multiply_one_row,
    split_rows,
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
            common.NameFixPass()(model)
            validation.after(rewrite.__name__, model)
    common.RemoveUnusedNodesPass()(model)
    common.DeduplicateInitializersPass()(model)
    common.TopologicalSortPass()(model)
    common.NameFixPass()(model)
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
