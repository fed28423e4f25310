"""Run 4-bit linears and lookups in blocks on ONNX Runtime's own kernels."""

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
    """Whether a value was integers that a product could take: of 8 bits."""
    stored = read_dequantize(value)
    return stored is not None and stored.is_byte


def _unsigned(integers: Array, bits: int) -> Array:
    if integers.dtype == np.uint8:
        return integers
    shifted: Array = (integers.astype(np.int16) + (1 << bits - 1)).astype(np.uint8)
    return shifted


def _packed(graph: ir.Graph, weight: StoredMatrix, block: int) -> ir.Value:
    """uint8 [N, blocks, block * bits / 8]; made once for a constant, whoever reads it."""
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
