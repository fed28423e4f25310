"""The report of an ONNX artifact: what ONNX Runtime runs in integers, what is left and why."""

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass

import onnx
from onnx import helper, shape_inference
from torch import Tensor
from torch.fx import GraphModule

from pt2e_quant.backends.onnx.runtime import Operator, OperatorKind, OptimizedModel
from pt2e_quant.core.capture import Capture
from pt2e_quant.core.provenance import FloatOperator, Provenance, provenance_of
from pt2e_quant.core.size_expression import evaluate_size
from pt2e_quant.flow.report.audit import OTHER_BACKEND
from pt2e_quant.flow.report.report import FloatRegion, Report

_HEAVY = (
    *("Conv", "FusedConv", "ConvTranspose", "Gemm", "FusedGemm", "MatMul", "FusedMatMul"),
    *("LSTM", "GRU", "RNN"),
)


@dataclass(frozen=True, slots=True)
class Refused:
    """A product that ONNX Runtime computes in float on a weight stored in integers.

    Args:
        op_type: of the product.
        weight: the name of the dequantized weight.
    """

    op_type: str
    weight: str


def make_report(gm: GraphModule, optimized: OptimizedModel, origins: Mapping[str, str]) -> Report:
    """Count operators, and name every dequantize that was not fused into its reader.

    Args:
        gm: the canonical graph.
        optimized: what ONNX Runtime runs.
        origins: module path of each value of the ONNX model.
    """
    provenance = provenance_of(gm)
    operators = Counter(o.op_type for o in optimized.operators)
    return Report(
        backend="ONNX Runtime",
        provenance=provenance,
        integer_ops=dict(optimized.count(OperatorKind.INTEGER)),
        float_ops=dict(optimized.count(OperatorKind.FLOAT)),
        float_regions=[_float_region(o, origins) for o in optimized.unfused()],
        notes=[
            f"{operators['QuantizeLinear']} quantize and {operators['DequantizeLinear']} "
            "dequantize operators left, those at the model's border included",
            *_wide_note(optimized),
        ],
        float_size_bytes=_float_bytes(gm, provenance),
    )


def _wide_note(optimized: OptimizedModel) -> list[str]:
    """Return the report's text on operators with 16-bit activations."""
    in_float = Counter(o.op_type for o in optimized.operators if o.reads_wide)
    if not in_float:
        return []
    counts = ", ".join(f"{count} {op_type}" for op_type, count in sorted(in_float.items()))
    return [
        "16-bit activations: ONNX Runtime's CPU provider has no arithmetic on them; run as "
        f"dequantize, float32, quantize: {counts}"
    ]


def refused_weights(optimized: OptimizedModel) -> list[Refused]:
    """Convolutions and matrix products that compute in float on a weight stored in integers."""
    return [
        Refused(reader, _plain_name(operator))
        for operator in optimized.unfused()
        if operator.is_constant and not operator.is_wide
        for reader in operator.readers
        if reader in _HEAVY
    ]


def _float_region(operator: Operator, origins: Mapping[str, str]) -> FloatRegion:
    name = _plain_name(operator)
    path = origins.get(name)
    readers = ", ".join(operator.readers) or "nothing"
    if operator.is_constant:
        reason = "ONNX Runtime has no integer form of what reads this weight"
        cost = "the whole weight is dequantized in every call"
    elif operator.is_wide:
        reason = f"ONNX Runtime has no kernel of {readers} for 16-bit integers"
        cost = "one pass over the tensor"
    else:
        reason = "what reads it computes in float"
        cost = "one pass over the tensor"
    return FloatRegion(
        node=f"{name} in {path}" if path else name,
        what=f"DequantizeLinear for {readers}",
        reason=reason,
        cost=cost,
    )


def _plain_name(operator: Operator) -> str:
    """The name of a dequantize's result, of which ONNX Runtime makes "node_name/duplicated"."""
    return operator.output.partition("/")[0].removeprefix("node_")


def _float_bytes(gm: GraphModule, provenance: Provenance) -> int:
    """The bytes of all constants in float: their bytes now, and those saved by quantizing."""
    tensors: list[Tensor] = [*gm.parameters(), *gm.buffers()]
    stored = sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())
    saved = sum(r.size_before - r.size_after for r in provenance.tensors if r.size_after)
    return stored + saved


def read_islands(model: bytes, floats: Set[str], capture: Capture) -> list[FloatOperator]:
    """The operators in float by their names, with the bytes at their borders.

    Args:
        model: the file's bytes.
        floats: the values that ONNX Runtime computes in float, by name.
        capture: of the call: dynamic sizes count as in the example that it was captured with.
    """
    graph = shape_inference.infer_shapes(onnx.load_from_string(model)).graph
    hints = {name: dim.hint for name, dim in capture.dims.items()}
    shown = (*graph.value_info, *graph.input, *graph.output)
    sizes = {value.name: _size_bytes(value, hints) for value in shown}
    dequantized = {n.output[0] for n in graph.node if n.op_type == "DequantizeLinear"}
    quantized = {n.input[0] for n in graph.node if n.op_type == "QuantizeLinear"}
    found = []
    for node in graph.node:
        if floats.isdisjoint(node.output) or not dequantized.isdisjoint(node.output):
            continue
        read = [name for name in dict.fromkeys(node.input) if name in dequantized]
        across = [sizes.get(n) for n in (*read, *(o for o in node.output if o in quantized))]
        found.append(
            FloatOperator(
                node=node.output[0],
                operator=node.op_type,
                module="",
                source="",
                bytes_across=None if None in across else sum(size or 0 for size in across),
                reason="ONNX Runtime runs it in float",
                remedy=OTHER_BACKEND,
            )
        )
    return found


def _size_bytes(value: onnx.ValueInfoProto, hints: Mapping[str, int]) -> int | None:
    """Bytes of a value; None where its shape is not known."""
    kind = value.type.tensor_type
    if not kind.HasField("shape"):
        return None
    count = 1
    for dim in kind.shape.dim:
        size = evaluate_size(dim.dim_param, hints) if dim.dim_param else dim.dim_value
        if size is None or not dim.WhichOneof("value"):
            return None
        count *= size
    return count * helper.tensor_dtype_to_np_dtype(kind.elem_type).itemsize
