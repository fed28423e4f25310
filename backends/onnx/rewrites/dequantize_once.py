"""Dequantize a weight when the file is loaded, and a table only in the rows that are looked up."""

from typing import Any

import numpy as np
import onnx_ir as ir

from pt2e_quant.backends.onnx.values import (
    Array,
    Dequantized,
    call,
    constant,
    int_attribute,
    is_wide,
    make_constant,
    permutation,
    read_dequantize,
    redirect,
)

_HEAVY = {"Conv", "ConvTranspose", "Gemm", "MatMul"}
_EIGHT_BIT = (np.dtype(np.int8), np.dtype(np.uint8))
_FOUR_BIT = (ir.DataType.INT4.numpy(), ir.DataType.UINT4.numpy())


def dequantize_once(graph: ir.Graph) -> int:
    """Write the dequantize of a weight of 8 bits as arithmetic, where a product in float reads it.

    ONNX Runtime computes arithmetic of constants once, at load, but keeps DequantizeLinear: it
    would run in every call, or be fused into a product that rounds the activations to 8 bits. So
    MatMuls of 16-bit activations are written so, too, also with weights of 4 bits. Their Convs and
    Gemms keep their q/dq: there ONNX Runtime quantizes a float weight again, to 8 bits per tensor.

    Before:  Conv | Gemm | MatMul (x, DequantizeLinear(w int8, scale, zero_point))
    After:   Conv | Gemm | MatMul (x, (Cast(w) - zero_point) * scale)
    """
    changed = 0
    for node in [n for n in graph if n.op_type == "DequantizeLinear"]:
        _part_readers(node)
    for node in list(graph):
        if node.op_type != "DequantizeLinear" or not _is_float_weight(node):
            continue
        integers, scale = constant(node.inputs[0]), constant(node.inputs[1])
        if integers is None or scale is None or integers.dtype not in _widths(node):
            continue
        redirect(node.outputs[0], write_as_arithmetic(graph, node))
        graph.remove(node, safe=True)
        changed += 1
    return changed


def _widths(dequantize: ir.Node) -> tuple[np.dtype[Any], ...]:
    """The types of weights that are dequantized at load."""
    is_beside_wide = all(is_wide(reader.inputs[0]) for reader in _readers(dequantize))
    return _EIGHT_BIT + _FOUR_BIT if is_beside_wide else _EIGHT_BIT


def _readers(dequantize: ir.Node) -> list[ir.Node]:
    """The nodes that read a weight, as it is or transposed."""
    readers = [use.node for use in dequantize.outputs[0].uses()]
    if all(reader.op_type == "Transpose" for reader in readers):
        return [use.node for reader in readers for use in reader.outputs[0].uses()]
    return readers


def _part_readers(dequantize: ir.Node) -> None:
    """Give products in float a dequantize of their own where others multiply the integers.

    Layers that a model calls twice share their weights, and one call may be left float.
    """
    if constant(dequantize.inputs[0]) is None:
        return
    output = dequantize.outputs[0]
    turns = [use.node for use in output.uses() if use.node.op_type == "Transpose"]
    values = [output, *(turn.outputs[0] for turn in turns)]
    uses = [use for value in values for use in value.uses() if use.node not in turns]
    floats = [use for use in uses if use.node.op_type in _HEAVY and not _reads_integers(use.node)]
    if not floats or len(floats) == len(uses):
        return
    options = {name: attribute.value for name, attribute in dequantize.attributes.items()}
    name = f"{output.name}_apart"
    made = {output: call(dequantize, "DequantizeLinear", dequantize.inputs, options, name=name)}
    made[output].type, made[output].shape = output.type, output.shape
    for use in floats:
        read = use.node.inputs[use.idx]
        assert read is not None
        if read not in made:
            turn = read.producer()
            assert turn is not None
            order = {"perm": permutation(turn) or []}
            own = f"{read.name}_apart"
            made[read] = call(turn, "Transpose", [made[output]], order, name=own, like=read)
        use.node.replace_input_with(use.idx, made[read])


def _is_float_weight(dequantize: ir.Node) -> bool:
    """True if all that reads a weight multiplies it with something that is no integer."""
    readers = _readers(dequantize)
    return bool(readers) and all(
        reader.op_type in _HEAVY and not _reads_integers(reader) for reader in readers
    )


def _reads_integers(product: ir.Node) -> bool:
    """True if a product's input was integers that ONNX Runtime looks for around it.

    Also before dimensions that it moves them past.
    """
    value = product.inputs[0]
    producer = value.producer() if value is not None else None
    while producer is not None and producer.op_type in ("Squeeze", "Unsqueeze"):
        value = producer.inputs[0]
        producer = value.producer() if value is not None else None
    if producer is None or producer.op_type not in ("DequantizeLinear", "DequantizePerToken"):
        return False
    stored = read_dequantize(value)
    return product.op_type != "MatMul" or stored is None or stored.is_byte


def write_as_arithmetic(graph: ir.Graph, node: ir.Node, name: str | None = None) -> ir.Value:
    """Write a DequantizeLinear of a constant in operators that run when a file is loaded.

    Their names begin with `name`, that of its result by default.
    """
    integers, scale = constant(node.inputs[0]), constant(node.inputs[1])
    assert integers is not None
    assert scale is not None
    output, base = node.outputs[0], name or node.outputs[0].name
    steps = node.inputs[0]
    zero_point = constant(node.inputs[2]) if len(node.inputs) > 2 else None
    grouped = scale.ndim == integers.ndim and scale.shape != integers.shape and scale.ndim > 0
    if grouped:
        # [N, K] as [N, G, K / G], against scales [N, G, 1].
        split = make_constant(graph, f"{base}_split", np.array([*scale.shape, -1]))
        steps = call(node, "Reshape", [steps, split], name=f"{base}_groups")
    real = call(node, "Cast", [steps], {"to": int(ir.DataType.FLOAT)}, name=f"{base}_cast")
    if zero_point is not None and np.any(zero_point):
        zeros = _beside(zero_point.astype(np.float32), node, integers.ndim, grouped=grouped)
        stored = make_constant(graph, f"{base}_zero_point", zeros)
        real = call(node, "Sub", [real, stored], name=f"{base}_centred")
    column = _beside(scale, node, integers.ndim, grouped=grouped)
    source = node.inputs[1].name if node.inputs[1] is not None else base
    stored = make_constant(graph, f"{source}_column", column)
    real = call(node, "Mul", [real, stored], name=f"{base}_real", like=None if grouped else output)
    if not grouped:
        return real
    whole = make_constant(graph, f"{base}_whole", np.array(integers.shape))
    return call(node, "Reshape", [real, whole], name=f"{base}_whole_real", like=output)


def _beside(qparams: Array, node: ir.Node, rank: int, *, grouped: bool) -> Array:
    """Qparams in a shape that broadcasts over the integers."""
    if grouped:
        return qparams[..., None]
    if qparams.ndim == 0:
        return qparams
    shape = [1] * rank
    shape[int_attribute(node, "axis", 1)] = -1
    return qparams.reshape(shape)


def gather_integers(graph: ir.Graph) -> int:
    """Gather from an integer table instead of dequantizing all of it in every call.

    Before:  Gather(dq(table int8[V, D], scale[V]), ids)
    After:   (Cast(Gather(table, ids)) - Gather(zero_point[V, 1], ids)) * Gather(scale[V, 1], ids)
    """
    changed = 0
    for node in list(graph):
        table = read_dequantize(node.inputs[0]) if node.op_type == "Gather" else None
        if table is None or constant(table.quantized) is None:
            continue
        if node.attributes["axis"].as_int() if "axis" in node.attributes else 0:
            continue
        if table.axis == 0:
            redirect(node.outputs[0], _rows(graph, node, table))
        elif table.axis is None:
            redirect(node.outputs[0], _one_scale(node, table))
        else:
            continue
        graph.remove(node, safe=True)
        changed += 1
    return changed


def _one_scale(node: ir.Node, table: Dequantized) -> ir.Value:
    found = _gather(node, table.quantized, f"{node.outputs[0].name}_q")
    inputs = [found, *table.node.inputs[1:]]
    name = f"{node.outputs[0].name}_dq"
    return call(node, "DequantizeLinear", inputs, name=name, like=node.outputs[0])


def _rows(graph: ir.Graph, node: ir.Node, table: Dequantized) -> ir.Value:
    base, output = node.outputs[0].name, node.outputs[0]
    scale_input = table.node.inputs[1]
    stored = scale_input.name if scale_input is not None else base
    found = _gather(node, table.quantized, f"{base}_q")
    to_float = {"to": int(ir.DataType.FLOAT)}
    real = call(node, "Cast", [found], to_float, name=f"{base}_cast", like=output)
    if np.any(table.zero_point):
        zeros = table.zero_point.astype(np.float32).reshape(-1, 1)
        zero_column = make_constant(graph, f"{stored}_zero_points", zeros)
        zero = _gather(node, zero_column, f"{base}_zero_point")
        real = call(node, "Sub", [real, zero], name=f"{base}_centred", like=output)
    column = make_constant(graph, f"{stored}_column", table.scale.reshape(-1, 1))
    scale = _gather(node, column, f"{base}_scale")
    return call(node, "Mul", [real, scale], name=f"{base}_dq", like=output)


def _gather(node: ir.Node, table: ir.Value, name: str) -> ir.Value:
    return call(node, "Gather", [table, node.inputs[1]], {"axis": 0}, name=name)
