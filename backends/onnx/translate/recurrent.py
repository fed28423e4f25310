"""The mark of a recurrent layer; `rewrites/write_recurrent.py` writes it out."""

from typing import Any

import onnx_ir as ir
from onnx.defs import OpSchema

from pt2e_quant.backends.onnx.translate.marks import mark
from pt2e_quant.core.recurrent_ops import RecurrentLayer

RECURRENT = "RecurrentLayer"

_INPUTS = ("x", "h0", "c0?", "w_ih", "w_hh", "b_ih?", "b_hh?", "w_hr?")
_TEXT, _INT = OpSchema.AttrType.STRING, OpSchema.AttrType.INT
_layer = mark(
    RECURRENT, _INPUTS, ("y", "c"), {"cell": _TEXT, "is_reverse": _INT, "rounding": _TEXT}
)


def recurrent_translations() -> dict[Any, Any]:
    """Operator overload to translation."""
    return {RecurrentLayer: recurrent_layer}


def recurrent_layer(
    x: ir.Value,
    h0: ir.Value,
    c0: ir.Value | None,
    w_ih: ir.Value,
    w_hh: ir.Value,
    b_ih: ir.Value | None,
    b_hh: ir.Value | None,
    w_hr: ir.Value | None,
    cell: str,
    is_reverse: bool,
    rounding: str,
) -> tuple[ir.Value, ir.Value]:
    """All hidden states, and the last cell state."""
    inputs = x, h0, c0, w_ih, w_hh, b_ih, b_hh, w_hr
    y, c = _layer(*inputs, cell=cell, is_reverse=int(is_reverse), rounding=rounding)
    return y, c
