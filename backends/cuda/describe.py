"""The report of a lowered program: node to kernel, and every q/dq that no kernel took."""

from collections import Counter

import torch
from torch.fx import GraphModule, Node

from pt2e_quant.backends.cuda.policy import Measures
from pt2e_quant.backends.fuse_kernels import KERNEL_KEY, REFUSED_KEY
from pt2e_quant.core.qdq import is_dequantize, is_qdq
from pt2e_quant.flow.report.report import FloatRegion, Report
from pt2e_quant.graph.op_table import operator_name
from pt2e_quant.graph.ops import arguments, is_getitem
from pt2e_quant.graph.subgraphs import NamedGraph, named_graphs
from pt2e_quant.kernels.cost import moved_bytes
from pt2e_quant.kernels.kernel import Kernel
from pt2e_quant.kernels.measured import Variant, measured_of
from pt2e_quant.kernels.norm_quantize.op import NormQuantizePerToken, NormQuantizePerTokenE4m3
from pt2e_quant.kernels.quantize.op import Quantize, QuantizePixels
from pt2e_quant.kernels.quantize_per_tensor.op import QuantizeTensor, QuantizeTensorE4m3
from pt2e_quant.kernels.quantize_per_token.op import QuantizeRows, QuantizeRowsE4m3
from pt2e_quant.kernels.read_scheme import scheme_of

_OPS: dict[object, str] = {
    QuantizeTensor: "quantize_per_tensor",
    QuantizeTensorE4m3: "quantize_per_tensor",
    QuantizeRows: "quantize_per_token",
    QuantizeRowsE4m3: "quantize_per_token",
    NormQuantizePerToken: "norm_quantize",
    NormQuantizePerTokenE4m3: "norm_quantize",
    Quantize: "quantize",
    QuantizePixels: "quantize",
}
"""Operators that passes insert without an entry of the registry."""

_WRITE_BOTH = frozenset(_OPS.values())
"""Units whose results in 8-bit floats were measured apart from those in integers."""


def describe(report: Report, lowered: GraphModule, measures: Measures) -> None:
    """Count operators; name kernels in use that were not measured, and lone q/dq with reasons."""
    kernels: Counter[str] = Counter()
    floats: Counter[str] = Counter()
    written: set[tuple[str, Variant]] = set()
    for graph, node in ((g, n) for g in named_graphs(lowered) for n in g.gm.graph.nodes):
        op = _fused_op(node)
        if op is not None:
            kernels[op] += 1
            written.add((op, _variant(node, op)))
        elif node.op == "call_function" and not is_getitem(node):
            floats[operator_name(node)] += 1
            if is_qdq(node):
                report.float_regions.append(_float_region(graph, node))
    report.integer_ops, report.float_ops = dict(kernels), dict(floats)
    for record in report.provenance.tensors:
        record.backends["cuda"] = f"{record.dtype} in fused kernels"
    unmeasured = sorted({_named(*one) for one in written if not _was_measured(*one, measures)})
    if unmeasured:
        where = measures.device or "a GPU"
        report.notes.append(f"not measured on {where}: {', '.join(unmeasured)}")


def _fused_op(node: Node) -> str | None:
    """The unit whose kernel a node calls, by its entry or by its operator; None for any other."""
    kernel: Kernel | None = node.meta.get(KERNEL_KEY)
    if kernel is not None:
        return kernel.op
    return _OPS.get(node.target) if node.op == "call_function" else None


def _variant(node: Node, op: str) -> Variant:
    """The output dtype of a fused call, where its kernel was measured separately for it."""
    if node.target is QuantizePixels:
        return Variant.PIXELS
    value = node.meta["val"]
    made = value[0] if isinstance(value, tuple | list) else value
    is_e4m3 = made.dtype is torch.float8_e4m3fn and op in _WRITE_BOTH
    return Variant.E4M3 if is_e4m3 else Variant.PLAIN


def _named(op: str, variant: Variant) -> str:
    return f"{op} to {variant}" if variant else op


def _was_measured(op: str, variant: Variant, measures: Measures) -> bool:
    return op == "data_movement" or bool(measured_of(op, measures.device, variant))


def _unmatched(gm: GraphModule, node: Node, reader: Node) -> str:
    """Why no kernel came into question: by the scheme of the tensor, where it is one."""
    if not is_dequantize(node) or reader.op != "call_function":
        return "no kernel has its pattern"
    scheme = scheme_of(gm, node)
    if scheme is not None:
        return f"no kernel has {operator_name(reader)} on {scheme}"
    block = arguments(node).get("block_size")
    return f"no kernel has blocks of {block}" if block else "no kernel has its pattern"


def _float_region(graph: NamedGraph, node: Node) -> FloatRegion:
    """A q/dq that runs by itself: a pass over memory."""
    refused: dict[str, str] = graph.gm.meta.get(REFUSED_KEY, {})
    is_weight = node.args[0] in graph.constants
    source = node.args[0]
    assert isinstance(source, Node)
    moved = moved_bytes(source.meta["val"], node.meta["val"])
    reader = next(iter(node.users)) if is_dequantize(node) else source
    what = "weight dequantize" if is_weight else operator_name(node).rpartition(".")[2]
    return FloatRegion(
        node=graph.prefix + reader.name,
        what=what,
        reason=refused.get(reader.name) or _unmatched(graph.gm, node, reader),
        # Symbolic for dynamic shapes, which no thousands separator is for.
        cost=f"{moved:,} bytes in every call" if type(moved) is int else f"{moved} bytes a call",
    )
