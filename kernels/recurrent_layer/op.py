"""The operator `pt2e_quant::recurrent_layer_int8`: a recurrent layer on its stored integers."""

from typing import Any

import torch
from torch import Tensor

from pt2e_quant.core.recurrent_ops import recurrent_layer
from pt2e_quant.kernels.cost import Cost, moved_bytes

_LIBRARY = torch.library.Library("pt2e_quant", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's own
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "recurrent_layer_int8(Tensor x, Tensor h0, Tensor? c0, Tensor w_ih, Tensor ih_scale, "
    "Tensor w_hh, Tensor hh_scale, Tensor? b_ih, Tensor? b_hh, Tensor? w_hr, Tensor? hr_scale, "
    "str cell, bool is_reverse, str rounding) -> (Tensor, Tensor)"
)


def decode(integers: Tensor, scale: Tensor) -> Tensor:
    """A weight in float32.

    Args:
        integers: int8[N, K].
        scale: float32[N].
    """
    return integers.float() * scale.unsqueeze(1)


def _run(
    x: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    w_ih: Tensor,
    ih_scale: Tensor,
    w_hh: Tensor,
    hh_scale: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    w_hr: Tensor | None,
    hr_scale: Tensor | None,
    cell: str,
    is_reverse: bool,
    rounding: str,
) -> tuple[Tensor, Tensor]:
    weights = decode(w_ih, ih_scale), decode(w_hh, hh_scale)
    projection = None if w_hr is None or hr_scale is None else decode(w_hr, hr_scale)
    biases = b_ih, b_hh
    return recurrent_layer(x, h0, c0, *weights, *biases, projection, cell, is_reverse, rounding)


def _fake(x: Tensor, h0: Tensor, c0: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    c = x.new_empty(0) if c0 is None else torch.empty_like(c0)
    return x.new_empty((*x.shape[:2], h0.shape[1])), c


torch.library.impl(_LIBRARY, "recurrent_layer_int8", "CompositeExplicitAutograd")(_run)
torch.library.register_fake("pt2e_quant::recurrent_layer_int8", lib=_LIBRARY)(_fake)

RecurrentLayerInt8 = torch.ops.pt2e_quant.recurrent_layer_int8.default
"""`pt2e_quant::recurrent_layer` on weights int8[N, K] with scales float32[N].

A program calls it; the module that runs has torch's own operators on packed or decoded weights in
its place (`backends.cpu.pack_recurrent`).
"""


def cost(x: Tensor, w_ih: Tensor, w_hh: Tensor, out: Tensor) -> Cost:
    """Bytes and operations of one call: the weight of the hidden state is read in every step."""
    steps, batch = (int(size) for size in x.shape[:2])
    return Cost(
        bytes=moved_bytes(x, w_ih, out) + steps * moved_bytes(w_hh),
        operations=2 * steps * batch * (w_ih.numel() + w_hh.numel()),
    )
