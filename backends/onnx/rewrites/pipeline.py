"""The rewrites in order, those that prevent bad fusions, and the clean-up after them."""

from ast import literal_eval
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
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
from pt2e_quant.backends.onnx.rewrites.keep_float import keep_weights_float, put_sum_behind
from pt2e_quant.backends.onnx.rewrites.layouts import drop_reshapes, join_reshapes, write_rows
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
    int_attribute,
    make_constant,
    read_dequantize,
    redirect,
)


def relu_as_max(graph: ir.Graph) -> int:
    """Write a relu that no quantize took over, after a quantized Gemm, as Max(x, 0).

    ONNX Runtime 1.31 makes a float FusedGemm of `Gemm -> Relu` before it looks at the
    quantization, where the relu's own result is not quantized; of all activations only relu.

    Before:  Relu(Gemm(dq(x), dq(w)))
    After:   Max(Gemm(dq(x), dq(w)), 0)
    """
    changed = 0
    for node in list(graph):
        source = node.inputs[0] if node.op_type == "Relu" else None
        gemm = source.producer() if source is not None else None
        if gemm is None or gemm.op_type != "Gemm" or read_dequantize(gemm.inputs[0]) is None:
            continue
        output = node.outputs[0]
        zero = make_constant(graph, "zero", np.zeros((), np.float32))
        redirect(output, call(node, "Max", [source, zero], name=f"{output.name}_max", like=output))
        graph.remove(node, safe=True)
        changed += 1
    return changed


def pool_in_float(graph: ir.Graph) -> int:
    """Put a Sum of one tensor, which copies it, behind an AveragePool in `ceil_mode`.

    The last windows of `ceil_mode` reach over the padded tensor's end. AveragePool divides them
    by what lies inside, as torch does; QLinearAveragePool of ONNX Runtime 1.32 by the whole window.
    It is fused only with a quantize directly behind it, and no Sum is taken out.

    Before:  AveragePool(dq(x), ceil_mode=1) -> q
    After:   AveragePool(dq(x), ceil_mode=1) -> Sum -> q
    """
    changed = 0
    for node in list(graph):
        if node.op_type != "AveragePool" or not int_attribute(node, "ceil_mode", 0):
            continue
        output = node.outputs[0]
        if not any(use.node.op_type != "Sum" for use in output.uses()):
            continue
        put_sum_behind(output)
        changed += 1
    return changed


def keep_layer_norm(graph: ir.Graph) -> int:
    """Write the addition in front of a LayerNormalization as Sum.

    ONNX Runtime 1.31 fuses `Add -> LayerNormalization` into SkipLayerNormalization, whose CPU
    kernel took five times as long as the two together (129 us against 24 us for
    float[1, 64, 384], one thread, AVX512). It does not look for Sum, which adds the same.

    Before:  LayerNormalization(Add(x, y))
    After:   LayerNormalization(Sum(x, y))
    """
    changed = 0
    for node in list(graph):
        if node.op_type != "Add" or node.outputs[0].dtype not in (None, ir.DataType.FLOAT):
            continue
        output = node.outputs[0]
        if not any(use.node.op_type == "LayerNormalization" for use in output.uses()):
            continue
        total = call(node, "Sum", node.inputs, name=f"{output.name}_sum", like=output)
        redirect(output, total)
        graph.remove(node, safe=True)
        changed += 1
    return changed


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
    keep_weights_float,
    keep_layer_norm,
    drop_reshapes,
    join_reshapes,
    write_rows,
    scale_products,
    use_supported_dtypes,
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
