"""Run operators on integers that ONNX Runtime could fuse with their q/dq, but does not.

Casts of constants are folded, activations become unsigned, relu and clip go out of the way of the
quantize behind them, and shared weights are transposed as integers.
"""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from pt2e_quant.backends.onnx.values import (
    Array,
    Dequantized,
    call,
    constant,
    int_attribute,
    make_constant,
    only_consumer,
    permutation,
    read_dequantize,
    read_quantize,
    redirect,
    remove_unread,
)

_DATA_INPUTS = {"Pad": 1, "Max": None, "Min": None, "SpaceToDepth": 1}
"""Operators with integer kernels, and how many leading inputs carry data (None: all)."""


def run_on_integers(graph: ir.Graph) -> int:
    """Take the q/dq off operators that only move or compare values.

    Before:  dq(x_q) -> Pad | Max | Min | SpaceToDepth (, Gather) -> q, all on the same qparams
    After:   Pad | Max | Min | SpaceToDepth (, Gather) (x_q)
    """
    changed = 0
    for node in list(graph):
        if node.op_type not in _DATA_INPUTS:
            continue
        count = _DATA_INPUTS[node.op_type] or len(node.inputs)
        moved = [node.outputs[0]]
        reader = only_consumer(node.outputs[0])
        if reader is not None and reader.op_type == "Gather" and node.op_type == "SpaceToDepth":
            moved.append(reader.outputs[0])  # as pixel_unshuffle is written
            reader = only_consumer(reader.outputs[0])
        after = read_quantize(reader) if reader is not None else None
        before = [read_dequantize(v) for v in node.inputs[:count]]
        if after is None or not _all_same(before, after):
            continue
        if node.op_type == "Pad" and not _quantize_pad_value(graph, node, after):
            continue
        for at, one in enumerate(before):
            assert one is not None
            node.replace_input_with(at, one.quantized)
        for value in moved:
            value.type = ir.TensorType(after.quantized.dtype or ir.DataType.UINT8)
        redirect(after.quantized, moved[-1])
        graph.remove(after.node, safe=True)
        changed += 1
    return changed


def cancel_requantize(graph: ir.Graph) -> int:
    """Take out a dequantize and quantize on the same qparams.

    Before:  x_q -> DequantizeLinear -> QuantizeLinear
    After:   x_q
    """
    changed = 0
    for node in list(graph):
        quantize = read_quantize(node)
        before = read_dequantize(node.inputs[0]) if quantize is not None else None
        if quantize is None or before is None or not quantize.same_qparams(before):
            continue
        if node.outputs[0].is_graph_output():
            continue
        redirect(node.outputs[0], before.quantized)
        graph.remove(node, safe=True)
        changed += 1
    return changed


def subtract_by_add(graph: ir.Graph) -> int:
    """Write a quantized subtraction as the addition that ONNX Runtime has in integers.

    The complement of y_q in uint8 is 255 - y_q, which with zero point 255 - z stands for -y.

    Before:  Sub(dq(x_q), dq(y_q, s, z)) -> q
    After:   Add(dq(x_q), dq(BitwiseNot(y_q), s, 255 - z)) -> q
    """
    changed = 0
    for node in list(graph):
        reader = only_consumer(node.outputs[0]) if node.op_type == "Sub" else None
        if reader is None or read_quantize(reader) is None:
            continue
        left, right = (read_dequantize(v) for v in node.inputs)
        if left is None or right is None or right.axis is not None:
            continue
        if right.zero_point.dtype != np.uint8:
            continue
        base = node.outputs[0].name
        zero_point = np.bitwise_not(right.zero_point)
        negated = call(
            node,
            "DequantizeLinear",
            [
                call(node, "BitwiseNot", [right.quantized], name=f"{base}_not"),
                right.node.inputs[1],
                make_constant(graph, f"{base}_zero_point", zero_point),
            ],
            name=f"{base}_negated",
            like=node.inputs[1],
        )
        total = call(node, "Add", [node.inputs[0], negated], name=f"{base}_add")
        total.type, total.shape = node.outputs[0].type, node.outputs[0].shape
        redirect(node.outputs[0], total)
        graph.remove(node, safe=True)
        changed += 1
    return changed


def _all_same(before: Sequence[Dequantized | None], after: Dequantized) -> bool:
    """On one set of qparams of 8 bits: there are no such kernels of 16."""
    is_plain = after.axis is None and after.is_byte
    return is_plain and all(one is not None and one.same_qparams(after) for one in before)


def _quantize_pad_value(graph: ir.Graph, node: ir.Node, qparams: Dequantized) -> bool:
    mode = node.attributes["mode"].as_string() if "mode" in node.attributes else "constant"
    value = node.inputs[2] if len(node.inputs) > 2 else None
    if mode != "constant":
        if value is not None:
            node.replace_input_with(2, None)
        return True
    real = constant(value) if value is not None else np.float32(0)
    if real is None:
        return False
    integer = np.array(qparams.to_integer(float(real)), qparams.zero_point.dtype)
    stored = make_constant(graph, f"{node.outputs[0].name}_value", integer)
    node.resize_inputs(max(len(node.inputs), 3))
    node.replace_input_with(2, stored)
    return True


def fold_casts(graph: ir.Graph) -> int:
    """Replace the cast of a constant by the constant in its new type.

    The exporter's own folding stops at constants of 8192 bytes, which the zero points of an
    embedding table exceed; a quantize with a computed zero point fuses with nothing.

    Two casts of one constant become one constant, so that tied weights stay tied.

    Before:  Cast(int32[V])
    After:   int8[V]
    """
    changed = 0
    made: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}
    for node in list(graph):
        array = constant(node.inputs[0]) if node.op_type == "Cast" else None
        if array is None:
            continue
        dtype = ir.DataType(node.attributes["to"].as_int())
        source = node.inputs[0]
        assert source is not None
        if (source, dtype) not in made:
            name = f"{source.name}_{dtype.name.lower()}"
            made[source, dtype] = make_constant(graph, name, array.astype(dtype.numpy()))
        redirect(node.outputs[0], made[source, dtype])
        graph.remove(node, safe=True)
        changed += 1
    return changed


def unsigned_activations(graph: ir.Graph) -> int:
    """Shift int8 activations by 128 into uint8, which stands for the same reals.

    On x86 ONNX Runtime runs uint8 activations about five times faster than int8 ones, and fuses
    more of them. Graphs of quantizers made for other backends come with int8.

    Before:  QuantizeLinear(x, s, int8 z) [-> Clip] -> DequantizeLinear
    After:   QuantizeLinear(x, s, uint8 z + 128) [-> Clip] -> DequantizeLinear
    """
    changed = 0
    for node in list(graph):
        quantize = read_quantize(node)
        if quantize is None or quantize.axis is not None or quantize.zero_point.dtype != np.int8:
            continue
        chain = _readers(node)
        if chain is None:
            continue
        for reader in (node, *chain):
            _shift(graph, reader)
        changed += 1
    return changed


def _readers(node: ir.Node) -> list[ir.Node] | None:
    """The dequantizes that read the integers, perhaps behind a Clip; None if anything else does."""
    found: list[ir.Node] = []
    for use in node.outputs[0].uses():
        reader = use.node
        if reader.op_type == "Clip" and all(constant(v) is not None for v in reader.inputs[1:]):
            behind = _readers(reader)
            if behind is None:
                return None
            found += [reader, *behind]
        elif read_dequantize(reader.outputs[0]) is not None:
            found.append(reader)
        else:
            return None
    return None if node.outputs[0].is_graph_output() else found


def _shift(graph: ir.Graph, node: ir.Node) -> None:
    """Move a node's integer constants up by 128, and its integer result's type."""
    first = 1 if node.op_type == "Clip" else 2
    for at in range(first, max(3, len(node.inputs))):
        value = node.inputs[at] if at < len(node.inputs) else None
        old = constant(value) if value is not None else np.zeros((), np.int8)
        assert old is not None
        if value is None and node.op_type == "Clip":
            continue
        shifted: Array = (old.astype(np.int16) + 128).astype(np.uint8)
        base = value.name if value is not None else f"{node.outputs[0].name}_zero_point"
        node.resize_inputs(max(len(node.inputs), at + 1))
        node.replace_input_with(at, make_constant(graph, f"{base}_unsigned", shifted))
    if node.op_type != "DequantizeLinear":
        node.outputs[0].type = ir.TensorType(ir.DataType.UINT8)
    if "output_dtype" in node.attributes:
        del node.attributes["output_dtype"]


def absorb_clips(graph: ir.Graph) -> int:
    """Let a quantize do a relu's or a clip's work, with a Clip on the integers if it must.

    ONNX Runtime fuses `Conv -> Relu -> QuantizeLinear` only when the quantized range ends at
    zero, and a clip only when the range lies inside it. Quantizing is monotone, so
    `q(clip(x, lo, hi)) == clip(q(x), q(lo), q(hi))` to the last bit, whatever the range.

    Before:  x -> Relu | Clip(lo, hi) -> QuantizeLinear
    After:   x -> QuantizeLinear [-> Clip(q(lo), q(hi)) if the integer range reaches further]
    """
    changed = 0
    for node in list(graph):
        limits = _clip_limits(node)
        value = node.outputs[0]
        if limits is None or value.is_graph_output():
            continue
        readers = [(use.node, read_quantize(use.node)) for use in value.uses()]
        if not readers or not all(_takes_over(q, limits) for _, q in readers):
            continue
        for reader, quantize in readers:
            assert quantize is not None
            reader.replace_input_with(0, node.inputs[0])
            _clip_integers(graph, reader, quantize, limits)
        graph.remove(node, safe=True)
        changed += 1
    return changed


def _takes_over(quantize: Dequantized | None, limits: tuple[float, float]) -> bool:
    if quantize is None or quantize.axis is not None:
        return False
    # ONNX has no Clip of 16-bit integers.
    return quantize.zero_point.dtype.itemsize == 1 or _integer_limits(quantize, limits) is None


def _integer_limits(quantize: Dequantized, limits: tuple[float, float]) -> tuple[int, int] | None:
    """The limits in integers; None where the type's own are as narrow."""
    low, high = (quantize.to_integer(limit) for limit in limits)
    return None if (low, high) == quantize.limits else (low, high)


def _clip_limits(node: ir.Node) -> tuple[float, float] | None:
    if node.op_type == "Relu":
        return 0.0, np.inf
    if node.op_type != "Clip":
        return None
    limits = [-np.inf, np.inf]
    for at, value in enumerate(node.inputs[1:]):
        array = constant(value)
        if array is not None and array.dtype == np.float32:
            limits[at] = float(array)
        elif value is not None:
            return None  # computed at run time, or a clip of integers
    return limits[0], limits[1]


def _clip_integers(
    graph: ir.Graph, reader: ir.Node, quantize: Dequantized, limits: tuple[float, float]
) -> None:
    integers = _integer_limits(quantize, limits)
    if integers is None:
        return
    low, high = integers
    dtype = quantize.zero_point.dtype
    value = reader.outputs[0]
    base = value.name or "quantized"
    clipped = call(
        reader,
        "Clip",
        [
            value,
            make_constant(graph, f"{base}_min", np.array(low, dtype)),
            make_constant(graph, f"{base}_max", np.array(high, dtype)),
        ],
        name=f"{base}_clipped",
        like=value,
        after=True,
    )
    clip = clipped.producer()
    for use in list(value.uses()):
        if use.node is not clip:
            use.node.replace_input_with(use.idx, clipped)


def turn_shared_weights(graph: ir.Graph) -> int:
    """Transpose the integers of a weight where several products read its dequantized transpose.

    ONNX Runtime joins a Transpose that two products read to each of them, as a FusedMatMul of
    floats, before it looks for dequantizes; one that a single product reads it moves to the
    integers itself. Layers that share their weights (ALBERT's) then all ran in float.

    Before:  MatMul(x, t), MatMul(y, t),   t = Transpose(DequantizeLinear(w[N, K], scale, axis=0))
    After:   the same,                     t = DequantizeLinear(Transpose(w), scale, axis=1)
    """
    changed = 0
    for node in list(graph):
        if permutation(node) != [1, 0] or len(list(node.outputs[0].uses())) < 2:
            continue
        read = read_dequantize(node.inputs[0])
        if read is None or constant(read.quantized) is None:
            continue
        name = node.outputs[0].name
        integers = call(
            node, "Transpose", [read.quantized], {"perm": [1, 0]}, name=f"{name}_turned"
        )
        integers.type = read.quantized.type
        axis = {} if read.axis is None else {"axis": 1 - int_attribute(read.node, "axis", 1) % 2}
        inputs = [integers, *read.node.inputs[1:]]
        real = call(
            node, "DequantizeLinear", inputs, axis, name=f"{name}_real", like=node.outputs[0]
        )
        redirect(node.outputs[0], real)
        remove_unread(graph, [node])
        changed += 1
    return changed
