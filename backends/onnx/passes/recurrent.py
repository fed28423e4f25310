"""The op-table entry of recurrent layers, and which of their operands are rounded."""

from collections.abc import Collection

from torch.fx import Node

from pt2e_quant.core.recurrent_ops import Cell, Rounding
from pt2e_quant.graph.recurrent_pattern import recurrent_row
from pt2e_quant.passes.recurrent.split_recurrent import LayerSizes, split_recurrent

_NO_PROJECTION = "ONNX has no recurrent operator with a projection (proj_size)"

RECURRENT_ROW = recurrent_row(
    "DynamicQuantizeLSTM; LSTM, GRU or RNN on weights dequantized at load",
    "an LSTM's input and hidden state are rounded to uint8 at run time, also in static recipes; "
    "of others, and under `w8`, the weights are int8 in the file and dequantized once, when the "
    "file is loaded: ONNX Runtime has no integer GRU or RNN",
)


def recurrent_form(
    sizes: LayerSizes, rounds_activations: bool, _: Collection[str]
) -> Rounding | str:
    """Return the rounding of a layer's operands, or the reason why it stays float."""
    if sizes.has_projection:
        return _NO_PROJECTION
    if rounds_activations and sizes.cell is Cell.LSTM:
        return Rounding.PER_TENSOR
    return Rounding.NONE


def _float_form(node: Node, sizes: LayerSizes) -> Rounding | str:
    return _NO_PROJECTION if sizes.has_projection else Rounding.NONE


split_left = split_recurrent(_float_form)
"""Operators left in float become ONNX's own: the exporter would write every step out."""
