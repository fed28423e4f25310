"""The operator `pt2e_quant::recurrent_layer`: one layer of an LSTM, GRU or RNN, in one direction.

ATen's recurrent operators run several layers and directions at once and say nothing of rounding
between the steps. With a layer for each call the weights are plain operands, which a dequantize can
stand in front of, and the rounding of the hidden state is a part of the definition.
"""

import warnings
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.qdq import ChoosePerToken, DequantizePerToken, QuantizePerToken


class Cell(StrEnum):
    """The kind of recurrent cell."""

    LSTM = "lstm"
    GRU = "gru"
    RNN_TANH = "rnn_tanh"
    RNN_RELU = "rnn_relu"


ROUNDING_KEY = "pt2e_quant.rounding"
"""The key of `node.meta` that holds the `Rounding` of a layer in a prepared graph.

The layer itself computes in float, as all of a prepared graph does, until convert."""


class Rounding(StrEnum):
    """Rounding of inputs and hidden states to 8 bits at run time, in front of the products.

    The input of all steps is rounded as one tensor, a hidden state in every step.
    """

    NONE = "none"
    PER_TENSOR = "per_tensor"
    """Affine, uint8, one range for a whole tensor."""
    PER_ROW = "per_row"
    """Affine, int8, a range for each row of a batch."""


_UNROUNDED: dict[Cell, Callable[..., Any]] = {
    Cell.LSTM: torch.lstm,
    Cell.GRU: torch.gru,
    Cell.RNN_TANH: torch.rnn_tanh,
    Cell.RNN_RELU: torch.rnn_relu,
}
_GATES = {Cell.LSTM: 4, Cell.GRU: 3, Cell.RNN_TANH: 1, Cell.RNN_RELU: 1}


def gate_count(cell: Cell) -> int:
    """Return the number of a weight's rows for each hidden value.

    >>> gate_count(Cell.GRU)
    3
    """
    return _GATES[cell]


_LIBRARY = torch.library.Library("pt2e_quant", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's own
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "recurrent_layer(Tensor x, Tensor h0, Tensor? c0, Tensor w_ih, Tensor w_hh, Tensor? b_ih, "
    "Tensor? b_hh, Tensor? w_hr, str cell, bool is_reverse, str rounding) -> (Tensor, Tensor)"
)


def recurrent_layer(
    x: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    w_hr: Tensor | None,
    cell: str,
    is_reverse: bool,
    rounding: str,
) -> tuple[Tensor, Tensor]:
    """The definition in plain torch; see `RecurrentLayer`.

    Raises:
        ConfigError: no cell or rounding has such a name.
    """
    kind, rounded = _named(cell, rounding)
    weights = [w for w in (w_ih, w_hh, b_ih, b_hh, w_hr) if w is not None]
    source = x.flip(0) if is_reverse else x
    if rounded is Rounding.NONE:
        y, c = _unrounded(kind, source, h0, c0, weights, has_biases=b_ih is not None)
    else:
        gates = F.linear(_rounded(source, rounded), w_ih, b_ih)
        y, c = _steps(kind, gates, h0, c0, (w_hh, b_hh, w_hr), rounded)
    return (y.flip(0) if is_reverse else y), c


def _named(cell: str, rounding: str) -> tuple[Cell, Rounding]:
    try:
        return Cell(cell), Rounding(rounding)
    except ValueError as error:
        raise ConfigError(f"pt2e_quant::recurrent_layer: {error}") from None


def _unrounded(
    cell: Cell,
    x: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    weights: Sequence[Tensor],
    *,
    has_biases: bool,
) -> tuple[Tensor, Tensor]:
    """Torch's own operator, which is faster than a loop over the steps."""
    h0 = h0.unsqueeze(0)
    state = h0 if c0 is None else [h0, c0.unsqueeze(0)]
    with warnings.catch_warnings():
        # Which of torch's kernels runs is no news for who quantizes: the values are the same.
        warnings.filterwarnings("ignore", message="LSTM with projections is not supported")
        y, *last = _UNROUNDED[cell](x, state, weights, has_biases, 1, 0.0, False, False, False)
    return y, x.new_empty(0) if c0 is None else last[1].squeeze(0).clone()


def _steps(
    cell: Cell,
    gates: Tensor,
    h: Tensor,
    c: Tensor | None,
    state_weights: tuple[Tensor, Tensor | None, Tensor | None],
    rounding: Rounding,
) -> tuple[Tensor, Tensor]:
    w_hh, b_hh, w_hr = state_weights
    found = []
    for gate in gates.unbind(0):
        state = F.linear(_rounded(h, rounding), w_hh, b_hh)
        if cell is Cell.LSTM:
            assert c is not None  # by schema of every LSTM
            h, c = _lstm_step(gate + state, c)
            h = h if w_hr is None else F.linear(_rounded(h, rounding), w_hr)
        elif cell is Cell.GRU:
            h = _gru_step(gate, state, h)
        else:
            h = torch.tanh(gate + state) if cell is Cell.RNN_TANH else F.relu(gate + state)
        found.append(h)
    return torch.stack(found), gates.new_empty(0) if c is None else c


def _lstm_step(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = gates.chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _gru_step(gates: Tensor, state: Tensor, h: Tensor) -> Tensor:
    x_r, x_z, x_n = gates.chunk(3, -1)
    h_r, h_z, h_n = state.chunk(3, -1)
    new = torch.tanh(x_n + torch.sigmoid(x_r + h_r) * h_n)
    return new + torch.sigmoid(x_z + h_z) * (h - new)


def _rounded(x: Tensor, rounding: Rounding) -> Tensor:
    """Quantized and dequantized."""
    if rounding is Rounding.PER_TENSOR:
        scale, zero_point = torch._choose_qparams_per_tensor(x, False)
        return torch.fake_quantize_per_tensor_affine(x, scale, zero_point, 0, 255)
    scales, zeros = ChoosePerToken(x, torch.int8)
    limits = -128, 127, torch.int8
    codes = QuantizePerToken(x, scales, zeros, *limits)
    real: Tensor = DequantizePerToken(codes, scales, zeros, *limits, torch.float32)
    return real


def _fake(x: Tensor, h0: Tensor, c0: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    _, w_hh, *_, cell, _, rounding = rest
    _named(cell, rounding)
    c = x.new_empty(0) if c0 is None else torch.empty_like(c0)
    return x.new_empty((*x.shape[:2], w_hh.shape[1])), c


torch.library.impl(_LIBRARY, "recurrent_layer", "CompositeExplicitAutograd")(recurrent_layer)
torch.library.register_fake("pt2e_quant::recurrent_layer", lib=_LIBRARY)(_fake)

RecurrentLayer = torch.ops.pt2e_quant.recurrent_layer.default
"""All hidden states of a layer, and an LSTM's last cell state (empty of other cells).

    x: float32[T, B, I]; time comes first.
    h0: float32[B, P], P being H, or the rows of w_hr.
    c0: float32[B, H] of an LSTM, else None.
    w_ih: float32[G H, I], w_hh: float32[G H, P]: the gates in torch's order, G = `gate_count`.
    b_ih, b_hh: float32[G H], both or none.
    w_hr: float32[P, H], an LSTM's projection, or None.
    cell: a `Cell`.
    is_reverse: from the last step to the first; the result is in the input's order.
    rounding: a `Rounding`.
"""
