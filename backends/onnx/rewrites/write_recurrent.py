"""Recurrent layers: exported as a mark, which a rewrite replaces with ONNX Runtime's operators."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx.defs import OpSchema

from pt2e_quant.backends.onnx.translate.marks import MARKS, mark
from pt2e_quant.backends.onnx.values import (
    MICROSOFT,
    Array,
    Attribute,
    Dequantized,
    call,
    constant,
    make_constant,
    read_dequantize,
    redirect,
    remove_unread,
)
from pt2e_quant.core.recurrent_ops import Cell, RecurrentLayer, Rounding

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


_OP_TYPES = {Cell.LSTM: "LSTM", Cell.GRU: "GRU", Cell.RNN_TANH: "RNN", Cell.RNN_RELU: "RNN"}
_ORDER = {Cell.LSTM: (0, 3, 1, 2), Cell.GRU: (1, 0, 2), Cell.RNN_TANH: (0,), Cell.RNN_RELU: (0,)}
"""Torch's gates in ONNX's order."""


def write_recurrent(graph: ir.Graph) -> int:
    """Write the marks of `recurrent_translations` out in ONNX operators.

    Weights that are not multiplied in integers are decoded by operators on constants, which ONNX
    Runtime runs once, when it loads a file.

    Before:  RecurrentLayer(x, h0, c0, dq(w_ih), dq(w_hh), b_ih, b_hh; rounding="per_tensor")
    After:   Squeeze(DynamicQuantizeLSTM(x, w_ih, w_hh, [b_ih; b_hh], …))
             or, with rounding="none", Squeeze(LSTM(x, Cast(w_ih) * scale, Cast(w_hh) * scale, …))
    """
    return _write(graph, is_portable=False)


def write_recurrent_portable(graph: ir.Graph) -> int:
    """As `write_recurrent`, in operators of the standard alone: none multiplies integers."""
    return _write(graph, is_portable=True)


def _write(graph: ir.Graph, *, is_portable: bool) -> int:
    found = [n for n in graph if n.domain == MARKS and n.op_type == RECURRENT]
    for node in found:
        layer = _Layer(graph, node)
        quantized = None if is_portable else layer.quantized()
        layer.finish(layer.integer(*quantized) if quantized else layer.plain())
    return len(found)


class _Layer:
    """One mark, and what takes its place."""

    def __init__(self, graph: ir.Graph, node: ir.Node) -> None:
        self.graph, self.node = graph, node
        self.base = node.outputs[0].name or "recurrent"
        attributes = node.attributes
        self.cell = Cell(attributes["cell"].as_string())
        self.rounding = Rounding(attributes["rounding"].as_string())
        self.is_reverse = bool(attributes["is_reverse"].as_int())
        inputs = list(node.inputs) + [None] * (8 - len(node.inputs))
        self.x, self.h0, self.c0, self.w_ih, self.w_hh, self.b_ih, self.b_hh, _ = inputs
        self.calls = 0

    def quantized(self) -> tuple[Dequantized, Dequantized] | None:
        """The weights behind their dequantizes, where the products are of integers."""
        found = read_dequantize(self.w_ih), read_dequantize(self.w_hh)
        if self.cell is not Cell.LSTM or self.rounding is not Rounding.PER_TENSOR:
            return None
        w_ih, w_hh = found
        return (w_ih, w_hh) if w_ih is not None and w_hh is not None else None

    def integer(self, w_ih: Dequantized, w_hh: Dequantized) -> ir.Node:
        """ONNX Runtime's operator, which rounds x and the hidden state itself."""
        held = [self._transposed(w) for w in (w_ih, w_hh)]
        scales = [part for w in (w_ih, w_hh) for part in self._qparams(w)]
        inputs = [self.x, *held, self._biases(), None, *self._initial(), None, *scales]
        return self._node("DynamicQuantizeLSTM", inputs, domain=MICROSOFT)

    def plain(self) -> ir.Node:
        """The standard's operator, on weights in float."""
        weights = [self._decoded(w) for w in (self.w_ih, self.w_hh)]
        inputs = [self.x, *weights, self._biases(), None, *self._initial()]
        return self._node(_OP_TYPES[self.cell], inputs)

    def finish(self, made: ir.Node) -> None:
        """Give the mark's readers the results, without the axis of directions."""
        y, *states = made.outputs
        axis = {1: self._held("axis", np.array([1])), 0: self._held("axis", np.array([0]))}
        old = self.node.outputs[0]
        redirect(old, self._call("Squeeze", [y, axis[1]], like=old))
        if self.cell is Cell.LSTM and list(self.node.outputs[1].uses()):
            last = self.node.outputs[1]
            redirect(last, self._call("Squeeze", [states[1], axis[0]], like=last))
        remove_unread(self.graph, [self.node])

    def _node(self, op_type: str, inputs: Sequence[ir.Value | None], domain: str = "") -> ir.Node:
        attributes: dict[str, Attribute | Sequence[str]] = {
            "hidden_size": self._hidden,
            "direction": "reverse" if self.is_reverse else "forward",
        }
        if self.cell is Cell.GRU:
            attributes["linear_before_reset"] = 1
        if self.cell is Cell.RNN_RELU:
            attributes["activations"] = ["Relu"]
        count = 3 if self.cell is Cell.LSTM else 1
        name = f"node_{self.base}_layer"
        made = ir.node(op_type, inputs, attributes, name=name, domain=domain, num_outputs=count)
        for i, output in enumerate(made.outputs):
            output.name = f"{self.base}_layer_{i}"
        self.graph.insert_before(self.node, made)
        made.metadata_props.update(self.node.metadata_props)
        return made

    @property
    def _hidden(self) -> int:
        shape = self.w_hh.shape if self.w_hh is not None else None
        assert shape is not None  # of a constant
        return int(shape[1])  # type: ignore[arg-type]  # of a constant

    def _initial(self) -> list[ir.Value | None]:
        zero = self._held("axis", np.array([0]))
        states = [self.h0, self.c0] if self.cell is Cell.LSTM else [self.h0]
        return [self._call("Unsqueeze", [state, zero]) for state in states]

    def _biases(self) -> ir.Value | None:
        if self.b_ih is None or self.b_hh is None:
            return None
        parts = [self._ordered(self._constant(b)) for b in (self.b_ih, self.b_hh)]
        return self._held("bias", np.concatenate(parts)[None])

    def _decoded(self, weight: ir.Value | None) -> ir.Value:
        quantized = read_dequantize(weight)
        if quantized is None:
            return self._held("weight", self._ordered(self._constant(weight))[None])
        integers = self._held("weight_q", self._ordered(self._constant(quantized.quantized))[None])
        scale = self._held("scale", self._ordered(quantized.scale)[None, :, None])
        cast = self._call("Cast", [integers], {"to": int(ir.DataType.FLOAT)})
        return self._call("Mul", [cast, scale])

    def _transposed(self, weight: Dequantized) -> ir.Value:
        integers = self._ordered(self._constant(weight.quantized))
        return self._held("weight_q", np.ascontiguousarray(integers.T)[None])

    def _qparams(self, weight: Dequantized) -> tuple[ir.Value, ir.Value]:
        scale = self._ordered(weight.scale)[None]
        zeros = np.zeros(scale.shape, np.int8)
        return self._held("scale", scale), self._held("zero_point", zeros)

    def _ordered(self, array: Array) -> Array:
        """Rows of gates in ONNX's order."""
        gates = np.split(array, len(_ORDER[self.cell]))
        return np.concatenate([gates[i] for i in _ORDER[self.cell]])

    def _constant(self, value: ir.Value | None) -> Array:
        found = constant(value)
        assert found is not None  # of a module's weight, which `conditions` asks for
        return found

    def _held(self, name: str, array: Array) -> ir.Value:
        return make_constant(self.graph, f"{self.base}_{name}", array)

    def _call(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: dict[str, Attribute] | None = None,
        like: ir.Value | None = None,
    ) -> ir.Value:
        self.calls += 1
        name = f"{self.base}_{op_type.lower()}_{self.calls}"
        return call(self.node, op_type, inputs, attributes, name=name, like=like)
