"""Linears and lookups on 4-bit weights in blocks: ONNX Runtime's kernels, or standard operators."""

import numpy as np
import onnx_ir as ir

from pt2e_quant.backends.onnx.linear_sites import (
    LinearSite,
    StoredMatrix,
    find_linears,
    read_matrix,
    replace_linear,
)
from pt2e_quant.backends.onnx.low_bit_rows import GROUP_SIZES
from pt2e_quant.backends.onnx.rewrites.expand_per_token import read_per_token
from pt2e_quant.backends.onnx.values import (
    MICROSOFT,
    Array,
    call,
    int_attribute,
    is_wide,
    make_constant,
    read_dequantize,
    redirect,
)

FLOAT_ACTIVATIONS, INT8_ACTIVATIONS = 0, 4
"""MatMulNBits' accuracy_level: float32 (1 means the same and ran the same), or each block of a
row rounded to int8 by its greatest magnitude."""


def multiply_blocks(graph: ir.Graph) -> int:
    """Give linears with 4-bit weights to MatMulNBits.

    An input quantized per token goes in as it is: the kernel rounds it itself, by blocks, which
    keeps it nearer to float than one scale a token does.

    Before:  MatMul(x | dq_token(q_token(x)), Transpose(dq(w uint4[N, K]))) + b
    After:   MatMulNBits(x, w uint8[N, K / block, block / 2], scale, zero_point, b)
    """
    changed = 0
    for site in find_linears(graph):
        rounded = read_per_token(site.x)
        block = block_of(site.weight)
        if site.weight.bits != 4 or block is None or _is_dequantized(site.x):
            continue
        x = site.x if rounded is None else rounded
        level = FLOAT_ACTIVATIONS if rounded is None else INT8_ACTIVATIONS
        redirect(site.output, _matmul_nbits(graph, site, x, block, level))
        replace_linear(site)
        changed += 1
    return changed


def look_up_blocks(graph: ir.Graph) -> int:
    """Give lookups in tables with scales in blocks, or of 4 bits, to GatherBlockQuantized.

    A linear on the same table shares its packed integers.

    Before:  Gather(dq(table uint4[V, D]), ids)
    After:   GatherBlockQuantized(Reshape(table uint8[V, D / block, block / 2]), ids, scale)
    """
    changed = 0
    for node in list(graph):
        table = read_matrix(node.inputs[0]) if node.op_type == "Gather" else None
        if table is None or int_attribute(node, "axis", 0) != 0:
            continue
        block = block_of(table)
        is_by_rows = table.scale.shape[1] == 1 and table.bits == 8
        if is_by_rows or block is None or table.integers.shape[1] % block:
            continue
        output, base = node.outputs[0], node.outputs[0].name
        packed = _packed(graph, table, block)
        shape = make_constant(graph, "packed_rows", np.array([table.integers.shape[0], -1]))
        rows = call(node, "Reshape", [packed, shape], name=f"{base}_table")
        found = call(
            node,
            "GatherBlockQuantized",
            [rows, node.inputs[1], _scale(graph, table, block), _zero_point(graph, table, block)],
            {"bits": table.bits, "block_size": block, "gather_axis": 0, "quantize_axis": 1},
            name=f"{base}_row",
            like=output,
            domain=MICROSOFT,
        )
        redirect(output, found)
        graph.remove(node, safe=True)
        changed += 1
    return changed


def block_of(weight: StoredMatrix) -> int | None:
    """The block a kernel can take a matrix in, None for none; whole rows are taken in parts."""
    columns, groups = weight.integers.shape[1], weight.scale.shape[1]
    if groups > 1:
        size = columns // groups
        return size if size in GROUP_SIZES else None
    fitting = [size for size in GROUP_SIZES if columns % size == 0]
    return max(fitting, default=GROUP_SIZES[0])


def pack_rows(integers: Array, bits: int) -> Array:
    """uint8 [..., n * bits / 8] of unsigned [..., n], the first in the lowest bits; padded with 0.

    >>> pack_rows(np.array([[1, 2, 3]], np.uint8), 4).tolist()
    [[33, 3]]
    """
    per_byte = 8 // bits
    missing = -integers.shape[-1] % per_byte
    padded = np.pad(integers, [(0, 0)] * (integers.ndim - 1) + [(0, missing)])
    parts = padded.reshape(*padded.shape[:-1], -1, per_byte).astype(np.uint8)
    packed = np.zeros(parts.shape[:-1], np.uint8)
    for place in range(per_byte):
        packed |= parts[..., place] << (bits * place)
    return packed


def _matmul_nbits(
    graph: ir.Graph, site: LinearSite, x: ir.Value, block: int, level: int
) -> ir.Value:
    weight = site.weight
    rows, columns = weight.integers.shape
    inputs: list[ir.Value | None] = [
        x,
        _packed(graph, weight, block),
        _scale(graph, weight, block),
        _zero_point(graph, weight, block),
        None,
        site.bias,
    ]
    while inputs[-1] is None:
        inputs.pop()
    return call(
        site.last,
        "MatMulNBits",
        inputs,
        {"K": columns, "N": rows, "bits": 4, "block_size": block, "accuracy_level": level},
        name=f"{site.output.name}_blocks",
        like=site.output,
        domain=MICROSOFT,
    )


def _is_dequantized(value: ir.Value) -> bool:
    """True if a value was integers that a product could take: of 8 bits."""
    stored = read_dequantize(value)
    return stored is not None and stored.is_byte


def _unsigned(integers: Array, bits: int) -> Array:
    if integers.dtype == np.uint8:
        return integers
    shifted: Array = (integers.astype(np.int16) + (1 << bits - 1)).astype(np.uint8)
    return shifted


def _packed(graph: ir.Graph, weight: StoredMatrix, block: int) -> ir.Value:
    """uint8 [N, blocks, block * bits / 8]; made once for all readers of a constant."""
    name = f"{weight.source.name}_packed_{block}"
    if name in graph.initializers:
        return graph.initializers[name]
    unsigned = _unsigned(weight.integers, weight.bits)
    rows, columns = unsigned.shape
    # Padding does not matter: MatMulNBits takes what is behind column K times zero.
    padded = np.pad(unsigned, ((0, 0), (0, -columns % block)))
    return make_constant(graph, name, pack_rows(padded.reshape(rows, -1, block), weight.bits))


def _scale(graph: ir.Graph, weight: StoredMatrix, block: int) -> ir.Value:
    blocks = -(-weight.integers.shape[1] // block)
    if weight.scale.shape[1] == blocks and len(weight.scale_source.shape or ()) == 2:
        return weight.scale_source
    name = f"{weight.scale_source.name}_blocks_{block}"
    if name in graph.initializers:
        return graph.initializers[name]
    return make_constant(graph, name, _repeated(weight.scale, blocks))


def _zero_point(graph: ir.Graph, weight: StoredMatrix, block: int) -> ir.Value | None:
    """Packed by rows; None where all are what the kernels take for granted, the middle."""
    zeros = _unsigned(weight.zero_point, weight.bits)
    if np.all(zeros == 1 << weight.bits - 1):
        return None
    name = f"{weight.source.name}_zero_point_{block}"
    if name in graph.initializers:
        return graph.initializers[name]
    blocks = -(-weight.integers.shape[1] // block)
    return make_constant(graph, name, pack_rows(_repeated(zeros, blocks), weight.bits))


def _repeated(qparams: Array, blocks: int) -> Array:
    """One column for each block: a scale of a whole row stands in every one."""
    repeated: Array = np.repeat(qparams, blocks // qparams.shape[1], axis=1)
    return repeated


def transpose_blocks(graph: ir.Graph) -> int:
    """Store the weights of 4-bit linears by columns, and their scales in blocks of those.

    ONNX Runtime fuses DequantizeLinear with the MatMul right behind it; other runtimes too.

    Before:  MatMul(x, Transpose(DequantizeLinear(w[N, K], scale, axis=1))) + b, also as Gemm
    After:   Sum(MatMul(x, DequantizeLinear(w[K, N], scale, axis=0)), b)

    A Sum, as ONNX Runtime makes a float Gemm of MatMul and Add before it looks at the integers.
    """
    changed = 0
    for site in find_linears(graph):
        weight = site.weight
        if weight.bits != 4 or is_wide(site.x):
            continue  # a fused product rounds its input to 8 bits
        output = site.output
        real = _by_columns(graph, site)
        result = call(site.node, "MatMul", [site.x, real], name=f"{output.name}_mm", like=output)
        if site.bias is not None:
            summands = [result, site.bias]
            result = call(site.last, "Sum", summands, name=f"{output.name}_sum", like=output)
        redirect(output, result)
        replace_linear(site)
        changed += 1
    return changed


def look_up_portable(graph: ir.Graph) -> int:
    """Look rows of blocks up as integers, and dequantize what was found.

    Gather takes no 4-bit integers: they are 4 bits in the file, 8 once it is loaded.

    Before:  Gather(dq(table uint4[V, D]), ids)
    After:   (Gather(Cast(table), ids) as [..., G, D / G] - Gather(zero_point)) * Gather(scale)
    """
    changed = 0
    for node in list(graph):
        table = read_matrix(node.inputs[0]) if node.op_type == "Gather" else None
        if table is None or int_attribute(node, "axis", 0) != 0:
            continue
        if table.scale.shape[1] == 1 and table.bits == 8:
            continue
        output, ids = node.outputs[0], node.inputs[1]
        base = output.name
        rank = len(output.shape or ()) - 1
        wide = ir.DataType.INT8 if table.integers.dtype == np.int8 else ir.DataType.UINT8
        stored = call(node, "Cast", [table.source], {"to": int(wide)}, name=f"{base}_table")
        rows = call(node, "Gather", [stored, ids], {"axis": 0}, name=f"{base}_q")
        groups = make_constant(
            graph, f"{base}_groups", np.array([0] * rank + [table.scale.shape[1], -1])
        )
        rows = call(node, "Reshape", [rows, groups], name=f"{base}_grouped")
        real = call(node, "Cast", [rows], {"to": int(ir.DataType.FLOAT)}, name=f"{base}_cast")
        zeros = table.zero_point.astype(np.float32)
        if np.any(zeros):
            real = _with_rows(graph, node, "Sub", real, zeros, ids, f"{base}_zero_point")
        real = _with_rows(graph, node, "Mul", real, table.scale, ids, f"{base}_scale")
        whole = make_constant(graph, f"{base}_whole", np.array([0] * rank + [-1]))
        redirect(output, call(node, "Reshape", [real, whole], name=f"{base}_dq", like=output))
        graph.remove(node, safe=True)
        changed += 1
    return changed


def _with_rows(
    graph: ir.Graph,
    node: ir.Node,
    op_type: str,
    real: ir.Value,
    qparams: Array,
    ids: ir.Value | None,
    name: str,
) -> ir.Value:
    held = make_constant(graph, f"{name}s", qparams[..., None])
    found = call(node, "Gather", [held, ids], {"axis": 0}, name=f"{name}_found")
    return call(node, op_type, [real, found], name=name)


def _by_columns(graph: ir.Graph, site: LinearSite) -> ir.Value:
    """A dequantize of the transposed weight, for this site alone."""
    dequantize = site.weight.node
    base = f"{site.output.name}_weight"
    source, *qparams = dequantize.inputs
    # Transposed when the file is loaded: another reader of this constant has it as it is.
    turned = call(site.node, "Transpose", [source], {"perm": [1, 0]}, name=f"{base}_q")
    assert source is not None
    turned.type = source.type
    inputs = [turned, *(_transposed(graph, value) for value in qparams)]
    axis = 1 - int_attribute(dequantize, "axis", 1)
    attributes = {"axis": axis, "block_size": int_attribute(dequantize, "block_size", 0)}
    made = call(site.node, "DequantizeLinear", inputs, attributes, name=base)
    rows, columns = site.weight.integers.shape
    made.type, made.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape((columns, rows))
    return made


def _transposed(graph: ir.Graph, value: ir.Value | None) -> ir.Value | None:
    """A constant matrix transposed, once for all its readers; anything else unchanged."""
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    if value is None or tensor is None or len(tensor.shape) != 2:
        return value
    name = f"{value.name}_columns"
    if name in graph.initializers:
        return graph.initializers[name]
    return make_constant(graph, name, tensor.numpy().T)
