"""Marks for weights whose codes ONNX has no dequantize for: odd widths, small floats, code books.

`rewrites/write_formats.py` writes them out in operators of the standard. Activations of these
schemes have no translation: `refuse_formats` turns them down by name.
"""

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
from onnx.defs import OpSchema

from pt2e_quant.backends.onnx.translate.marks import mark
from pt2e_quant.core.formats.format_ops import DequantizeBlock, DequantizeCodeBook, DequantizeFloat
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
