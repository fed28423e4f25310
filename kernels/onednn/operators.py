"""Operators of our own that a graph of oneDNN's needs to be a program like any other.

oneDNN's packed weights are opaque: no exporter, tracer or file takes them as constants. In a graph
they are the results of a packing operator on plain integers, which whoever runs the graph folds
(`backends.cpu` for itself, Inductor where it freezes). Its convolution with a sum writes into the
summand; here it gives a new tensor, and `write_sums_in_place` undoes that where nobody would see.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

aten: Any = torch.ops.aten
_onednn: Any = torch.ops.onednn
_LIBRARY = torch.library.Library("pt2e_quant", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's own

QConv = _onednn.qconv_pointwise.default
QConvSum = _onednn.qconv2d_pointwise.binary
"""Argument 6 is the summand; it is overwritten and returned."""
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
QLinear = _onednn.qlinear_pointwise.default
QLinearSum = _onednn.qlinear_pointwise.binary
"""Argument 6 is the summand; with "sum" for argument 13 it is overwritten, with "add" read.

It must be contiguous: torch 2.13 reshapes it to two dimensions, and where that copies, frees the
copy before oneDNN reads it.
"""

_LIBRARY.define(  # type: ignore[no-untyped-call]
    "pack_onednn_linear(Tensor weight, SymInt[]? x_shape) -> Tensor"
)
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "pack_onednn_conv(Tensor weight, Tensor scale, float x_scale, int x_zero_point, "
    "int[] stride, int[] padding, int[] dilation, int groups, SymInt[]? x_shape) -> Tensor"
)
for _own, _theirs in (("onednn_conv_sum", QConvSum), ("onednn_linear_sum", QLinearSum)):
    _arguments = str(_theirs._schema).partition("(")[2].rpartition(") ->")[0]
    _LIBRARY.define(  # type: ignore[no-untyped-call]
        f"{_own}({_arguments.replace('Tensor(a!)', 'Tensor')}) -> Tensor"
    )


def image_format(dims: int) -> torch.memory_format | None:
    """The order in which oneDNN's convolutions read and write a value of so many dimensions.

    None for those that have one order.
    """
    return _CHANNELS_LAST.get(dims)


def in_image_format(x: Tensor) -> Tensor:
    """An image or volume with its channels last; a copy unless it is so already."""
    memory_format = image_format(x.dim())
    return x if memory_format is None else x.contiguous(memory_format=memory_format)


def _pack_linear(weight: Tensor, x_shape: Sequence[int] | None) -> Tensor:
    packed: Tensor = _onednn.qlinear_prepack(weight, x_shape)
    return packed


def _pack_conv(weight: Tensor, *rest: Any) -> Tensor:
    packed: Tensor = _onednn.qconv_prepack(weight, *rest)
    return packed


def _fake_linear(weight: Tensor, x_shape: Sequence[int] | None) -> Tensor:
    return weight.new_empty((weight.shape[1], weight.shape[0]))  # packing transposes


def _fake_conv(weight: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(weight)


def _conv_sum(*args: Any) -> Tensor:
    summed: Tensor = QConvSum(*args[:6], args[6].clone(), *args[7:])
    return summed


def _fake_conv_sum(*args: Any) -> Tensor:
    return torch.empty_like(args[6])


def _linear_sum(*args: Any) -> Tensor:
    summed: Tensor = QLinearSum(*args[:6], args[6].contiguous(), *args[7:])
    return summed


def _fake_linear_sum(*args: Any) -> Tensor:
    made: Tensor = args[0].new_empty((*args[0].shape[:-1], args[3].shape[1]), dtype=args[10])
    return made


for _name, _run, _fake in (
    ("pack_onednn_linear", _pack_linear, _fake_linear),
    ("pack_onednn_conv", _pack_conv, _fake_conv),
    ("onednn_conv_sum", _conv_sum, _fake_conv_sum),
    ("onednn_linear_sum", _linear_sum, _fake_linear_sum),
):
    torch.library.impl(_LIBRARY, _name, "CompositeExplicitAutograd")(_run)
    torch.library.register_fake(f"pt2e_quant::{_name}", lib=_LIBRARY)(_fake)

PackLinear = torch.ops.pt2e_quant.pack_onednn_linear.default
"""int8[N, K] to oneDNN's layout; x_shape is what it is tuned for, None for any."""
PackConv = torch.ops.pt2e_quant.pack_onednn_conv.default
"""int8[N, C / groups, …] to oneDNN's layout; scales and geometry are those of the call."""
ConvSum = torch.ops.pt2e_quant.onednn_conv_sum.default
"""`QConvSum` that leaves its summand as it was."""
LinearSum = torch.ops.pt2e_quant.onednn_linear_sum.default
"""`QLinearSum` with "add" of a summand with any strides, under a name that Inductor's own fusions
do not know."""
