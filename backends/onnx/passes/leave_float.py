"""Keep operators float in ONNX: in the graph before the export, and in the model after it.

The graph's passes keep ONNX Runtime from integer kernels that were refused or measured slower.
`leave_float` writes products again that ONNX Runtime did not take the integers of.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from torch.fx import GraphModule, Node

from pt2e_quant.backends.onnx.report import Refused
from pt2e_quant.backends.onnx.rewrites.dequantize_once import write_as_arithmetic
from pt2e_quant.backends.onnx.rewrites.guide_fusions import keep_weight_float
from pt2e_quant.backends.onnx.rewrites.split_results import write_product
from pt2e_quant.backends.onnx.values import (
    constant,
    read_dequantize,
    redirect,
    remove_unread,
    stored_matrix,
)
from pt2e_quant.backends.target.float_retries import fallback_of
from pt2e_quant.backends.target.leave_slower import find_slower
from pt2e_quant.core.errors import module_path
from pt2e_quant.core.qdq import is_dequantize
from pt2e_quant.flow.report.report import FloatRegion
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.ops import aten
from pt2e_quant.graph.pipeline import HAS_VALUES, PassResult, graph_pass
from pt2e_quant.passes.qdq.remove_qdq import fold_dequantize

_MOST_LEFT = 0.5
"""Operators below this ratio stay float. Float between integers adds operators that the ratio does
not count: a copy, and transposes where convolutions around it have channels last."""


@graph_pass(needs=(HAS_VALUES,), gives=())
def leave_refused(gm: GraphModule) -> PassResult:
    """Keep ONNX Runtime from computing what was refused in integers; values stay those of the q/dq.

    It looks for a dq in front of an operator. The maximum of a tensor and itself is the tensor, and
    no optimizer takes it out.

    Before:  linear(dq(x_q), dq(w_q))
    After:   linear(maximum(dq(x_q), dq(x_q)), w), w the float values of w_q
    """
    editor = Editor(gm)
    for node in [n for n in gm.graph.nodes if n.op == "call_function" and fallback_of(n)]:
        for read in [n for n in node.all_input_nodes if is_dequantize(n)]:
            if isinstance(read.args[0], Node) and constant_of(gm, read.args[0]) is not None:
                fold_dequantize(gm, editor, read)
                continue
            _keep_apart(editor, read, node)
    return PassResult(editor.finish())


@graph_pass(needs=(HAS_VALUES,), gives=())
def leave_slower(gm: GraphModule) -> PassResult:
    """Keep ONNX Runtime from integer kernels that measured much slower than float ones here.

    Values stay those of the q/dq, and weights stay integers in the file. Dynamic sizes are judged
    as they are in the example inputs.

    Before:  q(avg_pool2d(dq(x_q)))
    After:   q(avg_pool2d(maximum(dq(x_q), dq(x_q))))
    """
    editor = Editor(gm)
    notes = []
    for slower in find_slower(gm, "onnx", most=_MOST_LEFT):
        for read in slower.reads:
            _keep_apart(editor, read, slower.node)
        notes.append(slower.note)
    return PassResult(editor.finish(), tuple(notes))


def _keep_apart(editor: Editor, read: Node, node: Node) -> None:
    apart = editor.call(aten.maximum.default, read, read, like=read, before=node)
    node.replace_input_with(read, apart)
    editor.changed = True


_STORED = (np.int8, np.uint8, np.int32)


@dataclass(frozen=True, slots=True)
class LeftFloat:
    """A product in float on a weight in integers.

    Args:
        op_type: of the ONNX operator.
        result: the name of its result.
    """

    op_type: str
    result: str

    def float_region(self, origins: Mapping[str, str]) -> FloatRegion:
        """Its entry in the report; `origins` are the module paths of values."""
        path = origins.get(self.result)
        return FloatRegion(
            node=f"{self.result} in {path}" if path else self.result,
            what=f"{self.op_type} in float",
            reason="ONNX Runtime has no integer form of it where it stands",
            cost="none against float: its weight is dequantized once, when the file is loaded",
        )


def leave_float(
    model: ir.Model, refused: Sequence[Refused], *, portable: bool
) -> list[LeftFloat] | None:
    """Write products again that ONNX Runtime computes in float on weights in integers.

    It looks for integers around each product by fixed patterns, and dequantizes the weight in
    every call where none fits. A linear is written as the integer product itself. What is no
    such product stays float, on a weight that is dequantized when the file is loaded.

    Before:  Conv | Gemm | MatMul (x, DequantizeLinear(w int8), DequantizeLinear(b int32))
    After:   MatMulIntegerToFloat(x_q, w, …) + b, or
             Conv | Gemm | MatMul (x, (Cast(w) - zero_point) * scale, Cast(b) * scale)

    Returns:
        Those that stay float; None if nothing was written again.
    """
    graphs = [model.graph, *model.graph.subgraphs()]
    named = {value.name: node for g in graphs for node in g for value in node.outputs}
    left: list[LeftFloat] = []
    is_changed = False
    for one in refused:
        node = named.get(one.weight)
        while node is not None and node.op_type == "Transpose":
            node = node.inputs[0].producer() if node.inputs[0] is not None else None
        if node is None or not _is_stored(node):
            continue
        readers = _readers(node)
        others = [r for r in readers if not write_product(r, is_portable=portable)]
        freed = _free(node, others) if others else []
        left += [LeftFloat(r.op_type, r.outputs[0].name or "") for r in freed]
        is_changed = is_changed or bool(freed) or len(others) < len(readers)
    return left if is_changed else None


def node_of(gm: GraphModule, name: str, origins: Mapping[str, str]) -> Node | None:
    """The node of a graph that a value of the ONNX model stands for, or one of its module."""
    found = next((n for n in gm.graph.nodes if n.name == name), None)
    if found is not None or name not in origins:
        return found
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    return next((n for n in reversed(calls) if module_path(n) == origins[name]), None)


def _is_stored(node: ir.Node) -> bool:
    """True if a node, which is still in its graph, dequantizes a constant weight or bias."""
    if node.graph is None or node.op_type != "DequantizeLinear":
        return False
    integers = stored_matrix(node.inputs[0])
    is_known = constant(node.inputs[1]) is not None and integers is not None
    return is_known and integers is not None and integers.dtype in _STORED


def _readers(dequantize: ir.Node) -> list[ir.Node]:
    """The products that read a weight, also transposed."""
    found = []
    for use in dequantize.outputs[0].uses():
        is_turned = use.node.op_type == "Transpose"
        found += _readers(use.node) if is_turned else [use.node]
    return found


def _is_bias(stored: ir.Node) -> bool:
    integers = constant(stored.inputs[0])
    return integers is not None and integers.dtype == np.int32


def _is_float_product(reader: ir.Node, bias: ir.Node) -> bool:
    """True for a product on a weight in float, or for the addition of a bias behind one."""
    if reader.op_type != "Add":
        return read_dequantize(reader.inputs[1]) is None
    others = [v.producer() for v in reader.inputs if v is not None and v.producer() is not bias]
    return all(
        one is not None and one.op_type == "MatMul" and read_dequantize(one.inputs[1]) is None
        for one in others
    )


def _free(node: ir.Node, readers: Sequence[ir.Node]) -> Sequence[ir.Node]:
    """Have a weight or bias dequantized at load; the products that this was done for."""
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    if _is_bias(node):
        freed = [r for r in readers if _is_float_product(r, node)]
    else:
        freed = list(readers)
        redirect(node.outputs[0], write_as_arithmetic(graph, node))
    for reader in freed:
        for index, value in enumerate(reader.inputs):
            stored = value.producer() if value is not None else None
            if stored is None or not _is_stored(stored) or not _is_bias(stored):
                continue
            name = f"{reader.outputs[0].name}_bias"
            reader.replace_input_with(index, write_as_arithmetic(graph, stored, name))
            remove_unread(graph, [stored])
        keep_weight_float(reader)
    remove_unread(graph, [node])
    return freed
