"""The report of a .pt2 program, read off its graph: it carries no provenance of its own."""

from collections import Counter

from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.core.errors import InvariantError, module_path
from pt2e_quant.core.provenance import FloatRecord, Provenance, TensorRecord
from pt2e_quant.core.qdq import QDQ_OPS, is_dequantize, is_quantize, read_qparams
from pt2e_quant.core.schemes import Role
from pt2e_quant.flow.report.report import Report
from pt2e_quant.graph.meta import source_constant
from pt2e_quant.graph.op_table import operator_name


def describe_program(gm: GraphModule) -> Report:
    """What of a program is quantized: its q/dq nodes, and the operators between them."""
    provenance = Provenance(quantizer="read off the graph")
    integer: Counter[str] = Counter()
    floating: Counter[str] = Counter()
    between: set[Node] = set()
    has_qdq = any(n.op == "call_function" and n.target in QDQ_OPS for n in gm.graph.nodes)
    reason = (
        "it is not between dequantize and quantize" if has_qdq else "this program is not quantized"
    )
    for node in gm.graph.nodes:
        if is_quantize(node) or is_dequantize(node):
            record = _tensor(gm, node)
            if record is not None:
                provenance.tensors.append(record)
        elif not _computes_float(node) or _makes_scales(node):
            continue
        elif _is_integer(node, between):
            between.add(node)
            integer[operator_name(node)] += 1
        else:
            floating[operator_name(node)] += 1
            provenance.floats.append(_float(node, reason))
    tensors = {id(t): t for t in [*gm.parameters(), *gm.buffers()]}
    size = sum(_bytes(t) for t in tensors.values())
    saved = sum(r.size_before - r.size_after for r in provenance.tensors if r.size_after)
    return Report(
        backend="torch.export program",
        provenance=provenance,
        integer_ops=dict(integer),
        float_ops=dict(floating),
        size_bytes=size,
        float_size_bytes=size + saved,
        notes=["read off the graph: what stands between dequantize and quantize counts as integer"]
        if has_qdq
        else [],
    )


def _is_integer(node: Node, between: set[Node]) -> bool:
    """Whether a backend can run a node in integers: on a stored weight, or from dq to q."""
    if any(is_dequantize(n) and _stored(n) is not None for n in node.all_input_nodes):
        return True
    starts = any(is_dequantize(n) or n in between for n in node.all_input_nodes)
    return starts and any(is_quantize(user) for user in node.users)


def _makes_scales(node: Node) -> bool:
    """Whether it only lays out the scales of other q/dq: double-quantized ones are so."""
    readers = list(node.users)
    return bool(readers) and all(
        (is_quantize(user) or is_dequantize(user)) and user.args[0] is not node for user in readers
    )


def _stored(node: Node) -> Node | None:
    """The constant that a q/dq reads."""
    source = node.args[0]
    assert isinstance(source, Node)
    return source_constant(source)


def _tensor(gm: GraphModule, node: Node) -> TensorRecord | None:
    """A record for a quantize of an activation, or a dequantize of a stored constant."""
    source = node.args[0]
    assert isinstance(source, Node)
    constant = _stored(node)
    if is_dequantize(node) and constant is None:
        return None
    value = source.meta.get("val")
    stored = _bytes(value) if constant is not None and isinstance(value, Tensor) else 0
    record = TensorRecord(
        name=str(constant.target) if constant is not None else source.name,
        role=Role.WEIGHT if constant is not None else Role.INPUT,
        module=module_path(node),
        uses=[user.name for user in node.users],
    )
    try:
        qparams = read_qparams(gm, node)
    except InvariantError:
        record.dtype = "dynamic"
        return record
    record.dtype = str(qparams.dtype).removeprefix("torch.")
    record.quant_min, record.quant_max = qparams.quant_min, qparams.quant_max
    record.axis = qparams.axis
    record.scale, record.zero_point = qparams.scale.tolist(), qparams.zero_point.tolist()
    if stored and isinstance(value, Tensor):
        # With its qparams: a float32 scale and an int64 zero_point each.
        record.size_after = stored + 12 * len(record.scale)
        record.size_before = 4 * value.numel()
    return record


def _float(node: Node, reason: str) -> FloatRecord:
    constants = (n.meta.get("val") for n in node.all_input_nodes if n.op == "get_attr")
    return FloatRecord(
        node=node.name,
        op=operator_name(node),
        module=module_path(node),
        reason=reason,
        size=sum(_bytes(v) for v in constants if isinstance(v, Tensor)),
    )


def _computes_float(node: Node) -> bool:
    value = node.meta.get("val")
    first = value[0] if isinstance(value, (tuple, list)) and value else value
    return node.op == "call_function" and isinstance(first, Tensor) and first.is_floating_point()


def _bytes(tensor: Tensor) -> int:
    return int(tensor.numel() * tensor.element_size())
