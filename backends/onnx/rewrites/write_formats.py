"""Write weights of odd widths, small floats and code books in operators of the ONNX standard.

Exporting makes a mark of each dequantize that ONNX has no operator for; the rewrite replaces the
marks. ONNX Runtime computes operators whose inputs are all constants once, when it loads a file.
So a weight takes its few bits in the file, is float in memory, and costs no time in a call.
Activations of these schemes have no translation: `refuse_formats` rejects them by name.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx.defs import OpSchema

from pt2e_quant.backends.onnx.translate.marks import MARKS, mark
from pt2e_quant.backends.onnx.values import Array, call, make_constant, redirect
from pt2e_quant.core.formats.blocks import WHOLE, grid_shape
from pt2e_quant.core.formats.float_codes import decode_float
from pt2e_quant.core.formats.format_ops import DequantizeBlock, DequantizeCodeBook, DequantizeFloat
from pt2e_quant.core.formats.number_formats import float_format
from pt2e_quant.core.unpack_op import Unpack

UNPACK, BLOCK, FLOAT, CODE_BOOK = "Unpack", "DequantizeBlock", "DequantizeFloat", "DequantizeBook"

_INT, _INTS, _TEXT = OpSchema.AttrType.INT, OpSchema.AttrType.INTS, OpSchema.AttrType.STRING
_UNPACKED = {"bits": _INT, "is_signed": _INT, "shape": _INTS, "to": _INT}
_unpack = mark(UNPACK, ("packed",), ("codes",), _UNPACKED)
_block = mark(BLOCK, ("codes", "scales", "zero_points?"), ("x",), {"block": _INTS, "to": _INT})
_FLOATS = {"block": _INTS, "format": _TEXT, "to": _INT}
_float = mark(FLOAT, ("codes", "scales", "tensor_scale?"), ("x",), _FLOATS)
_book = mark(CODE_BOOK, ("codes", "table", "scales?"), ("x",), {"block": _INTS, "to": _INT})


def format_translations() -> dict[Any, Any]:
    """Operator overload to translation."""
    return {
        Unpack: unpack,
        DequantizeBlock: dequantize_block,
        DequantizeFloat: dequantize_float,
        DequantizeCodeBook: dequantize_codebook,
    }


def unpack(
    packed: ir.Value,
    bits: int,
    is_signed: bool,
    shape: Sequence[int],
    dtype: ir.DataType | None = None,
) -> Any:
    """int8 or uint8 of `shape`, or `dtype`, of packed bytes."""
    own = ir.DataType.INT8 if is_signed else ir.DataType.UINT8
    to = own if dtype in (None, -1) else dtype
    return _unpack(packed, bits=bits, is_signed=int(is_signed), shape=list(shape), to=int(to))


def dequantize_block(
    codes: ir.Value,
    scales: ir.Value,
    zero_points: ir.Value | None,
    block_size: Sequence[int],
    quant_min: int,
    quant_max: int,
    dtype: ir.DataType,
    out_dtype: ir.DataType | None = None,
) -> Any:
    """Real values of integers in blocks."""
    return _block(codes, scales, zero_points, block=list(block_size), to=_real(out_dtype))


def dequantize_float(
    codes: ir.Value,
    scales: ir.Value,
    tensor_scale: ir.Value | None,
    block_size: Sequence[int],
    format: str,
    out_dtype: ir.DataType | None = None,
) -> Any:
    """Real values of small floats in blocks."""
    block, to = list(block_size), _real(out_dtype)
    return _float(codes, scales, tensor_scale, block=block, format=format, to=to)


def dequantize_codebook(
    codes: ir.Value,
    table: ir.Value,
    scales: ir.Value | None,
    block_size: Sequence[int],
    out_dtype: ir.DataType | None = None,
) -> Any:
    """Real values of places in a table."""
    return _book(codes, table, scales, block=list(block_size), to=_real(out_dtype))


def _real(dtype: ir.DataType | None) -> int:
    return int(ir.DataType.FLOAT if dtype in (None, -1) else dtype)


_FLOAT8 = (ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT8E5M2)
_POWERS = np.append(np.exp2(np.arange(255) - 127.0), np.nan).astype(np.float32)
"""The values of float8_e8m0fnu, by code."""


def write_formats(graph: ir.Graph) -> int:
    """Write the marks of `format_translations` out in ONNX operators.

    Before:  DequantizeBook(Unpack(packed), table, scales)
    After:   Gather(table, BitwiseAnd(BitShift(packed, …), 15)) * scales, in blocks
    """
    found = [n for n in graph if n.domain == MARKS and n.op_type in _WRITERS]
    for node in found:
        output = node.outputs[0]
        made = _WRITERS[node.op_type](_Site(graph, node))
        made.type, made.shape = output.type, output.shape
        redirect(output, made)
        graph.remove(node, safe=True)
    return len(found)


class _Site:
    """One mark, and how operators are put in front of it."""

    def __init__(self, graph: ir.Graph, node: ir.Node) -> None:
        self.graph, self.node = graph, node
        self.base = node.outputs[0].name or "weight"
        self.count = 0

    def op(self, op_type: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        """A new operator in front of the mark."""
        self.count += 1
        return call(self.node, op_type, inputs, attributes, name=f"{self.base}_{self.count}")

    def held(self, array: Array) -> ir.Value:
        """A new constant."""
        return make_constant(self.graph, f"{self.base}_constant", array)

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """Cast a value to another dtype."""
        return self.op("Cast", value, to=int(dtype))

    def reshape(self, value: ir.Value, shape: Sequence[int]) -> ir.Value:
        """Reshape a value."""
        return self.op("Reshape", value, self.held(np.array(shape, np.int64)))

    def input(self, index: int) -> ir.Value | None:
        """An input, None where it is missing."""
        return self.node.inputs[index] if index < len(self.node.inputs) else None

    def given(self, index: int) -> ir.Value:
        """An input that is never missing."""
        value = self.input(index)
        assert value is not None
        return value

    @property
    def shape(self) -> list[int]:
        """The shape of the codes, which is that of the result."""
        return _sizes(self.given(0))

    @property
    def block(self) -> list[int]:
        """Lengths of a block, see `core.blocks`."""
        return list(self.node.attributes["block"].as_ints())

    def result(self, value: ir.Value) -> ir.Value:
        """Cast a value to the result dtype of the mark."""
        to = ir.DataType(self.node.attributes["to"].as_int())
        return value if to is ir.DataType.FLOAT else self.cast(value, to)

    def scales(self, index: int) -> ir.Value:
        """Scales as float32; uint8 ones are the bytes of powers of two."""
        value = self.given(index)
        if value.dtype is ir.DataType.UINT8:
            return self.op("Gather", self.held(_POWERS), self.cast(value, ir.DataType.INT32))
        return value if value.dtype is ir.DataType.FLOAT else self.cast(value, ir.DataType.FLOAT)

    def with_blocks(self, op_type: str, value: ir.Value, per_block: ir.Value) -> ir.Value:
        """`op_type` of each element and what its block has, which is of `grid_shape`."""
        shape, block = self.shape, self.block
        grid = grid_shape(shape, block)
        if any(n > 1 and 1 < b and s % b for s, b, n in zip(shape, block, grid, strict=True)):
            return self.op(op_type, value, self._repeated(per_block))
        if all(length in (1, WHOLE) for length in block):
            return self.op(op_type, value, self.reshape(per_block, grid))
        wide = [size for n, s in zip(grid, shape, strict=True) for size in (n, s // n)]
        narrow = [size for n in grid for size in (n, 1)]
        made = self.op(op_type, self.reshape(value, wide), self.reshape(per_block, narrow))
        return self.reshape(made, shape)

    def _repeated(self, per_block: ir.Value) -> ir.Value:
        """Scales for each element, where the last block of an axis is shorter."""
        for axis, (size, length) in enumerate(zip(self.shape, self.block, strict=True)):
            if length not in (1, WHOLE):
                places = self.held((np.arange(size) // length).astype(np.int32))
                per_block = self.op("Gather", per_block, places, axis=axis)
        return per_block


def _sizes(value: ir.Value) -> list[int]:
    """The sizes of what is computed from constants, which are all known."""
    assert value.shape is not None
    return [size for size in value.shape if isinstance(size, int)]


def _write_unpack(site: _Site) -> ir.Value:
    """Values of b bits out of the stream of bits that `core.packing` describes."""
    attributes = site.node.attributes
    bits = attributes["bits"].as_int()
    shape = list(attributes["shape"].as_ints())
    packed = site.given(0)
    row_bytes = _sizes(packed)[-1]
    rows = math.prod(shape[:1]) if len(shape) > 1 else 1
    per_unit, unit_bytes = 8 // math.gcd(bits, 8), bits // math.gcd(bits, 8)
    stream = site.reshape(packed, [rows, row_bytes])
    if missing := -row_bytes % unit_bytes:
        stream = site.op("Pad", stream, site.held(np.array([0, 0, 0, missing])))
    # BitShift takes 8, 32 and 64 bits; a value lies in at most two bytes.
    units = site.cast(site.reshape(stream, [rows, -1, unit_bytes]), ir.DataType.UINT32)
    at = np.arange(per_unit) * bits
    words = site.op("Gather", units, site.held(at // 8), axis=2)
    if unit_bytes > 1:
        behind = np.minimum(at // 8 + 1, unit_bytes - 1)
        high = site.op("Gather", units, site.held(behind), axis=2)
        words = site.op("Add", words, site.op("Mul", high, site.held(np.array(256, np.uint32))))
    places = site.held((at % 8).astype(np.uint32))
    made = call(
        site.node,
        "BitShift",
        [words, places],
        {"direction": "RIGHT"},
        name=f"{site.base}_shifted",
    )
    codes = site.op("BitwiseAnd", made, site.held(np.array((1 << bits) - 1, np.uint32)))
    codes = site.cast(site.reshape(codes, [rows, -1]), ir.DataType.INT32)
    length = math.prod(shape) // rows
    if length * bits % (8 * unit_bytes):
        ends = [np.array([v], np.int64) for v in (0, length, 1)]
        codes = site.op("Slice", codes, *(site.held(v) for v in ends))
    if attributes["is_signed"].as_int():
        sign = site.held(np.array(1 << (bits - 1), np.int32))
        codes = site.op("Sub", site.op("BitwiseXor", codes, sign), sign)
    codes = site.reshape(codes, shape)
    return site.cast(codes, ir.DataType(attributes["to"].as_int()))


def _write_block(site: _Site) -> ir.Value:
    steps = site.cast(site.given(0), ir.DataType.FLOAT)
    zeros = site.input(2)
    if zeros is not None:
        steps = site.with_blocks("Sub", steps, site.cast(zeros, ir.DataType.FLOAT))
    return site.result(site.with_blocks("Mul", steps, site.scales(1)))


def _write_float(site: _Site) -> ir.Value:
    codes = site.given(0)
    if codes.dtype in _FLOAT8:
        value = site.cast(codes, ir.DataType.FLOAT)
    else:
        form = float_format(site.node.attributes["format"].as_string())
        values = decode_float(torch.arange(1 << form.bits, dtype=torch.uint8), form).numpy()
        value = site.op("Gather", site.held(values), site.cast(codes, ir.DataType.INT32))
    scales = site.scales(1)
    whole = site.input(2)
    if whole is not None:
        # As the graph: the scale of all times that of the block first.
        scales = site.op("Mul", scales, site.reshape(whole, [1] * len(site.shape)))
    return site.result(site.with_blocks("Mul", value, scales))


def _write_code_book(site: _Site) -> ir.Value:
    table = site.scales(1)
    codes = site.cast(site.given(0), ir.DataType.INT32)
    *grid, size = _sizes(site.given(1))
    if grid:
        first = np.arange(0, math.prod(grid) * size, size, dtype=np.int32).reshape(grid)
        codes = site.with_blocks("Add", codes, site.held(first))
        table = site.reshape(table, [-1])
    value = site.op("Gather", table, codes)
    if site.input(2) is not None:
        value = site.with_blocks("Mul", value, site.scales(2))
    return site.result(value)


_WRITERS = {
    UNPACK: _write_unpack,
    BLOCK: _write_block,
    FLOAT: _write_float,
    CODE_BOOK: _write_code_book,
}
