"""Translations of operators that the exporter lacks, or writes in a form that does not fuse.

Each function takes what `torch.onnx.export` hands a custom translation: `ir.Value`s for tensors,
Python values for literals, an `ir.DataType` for a dtype.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnxscript import opset21
from torch.onnx._internal.exporter._torchlib.ops.hop import (
    higher_order_scan,
    higher_order_while_loop,
)

from pt2e_quant.backends.onnx.rewrites.expand_per_token import per_token_translations
from pt2e_quant.backends.onnx.rewrites.rows_of_experts import expert_translations
from pt2e_quant.backends.onnx.rewrites.write_formats import format_translations
from pt2e_quant.backends.onnx.rewrites.write_recurrent import recurrent_translations
from pt2e_quant.backends.onnx.translate.activations import activation_translations
from pt2e_quant.backends.onnx.translate.marks import mark
from pt2e_quant.backends.onnx.translate.reductions import reduction_translations
from pt2e_quant.backends.onnx.values import MICROSOFT, typed
from pt2e_quant.graph.idioms.masks import AdditiveMask, AnySeen
from pt2e_quant.graph.idioms.rms_norm import RmsNorm
from pt2e_quant.graph.idioms.rotary_embedding import RotaryEmbedding
from pt2e_quant.graph.idioms.shared_heads import RegroupHeads

op: Any = opset21
"""onnxscript's operators; each call adds a node to the model being written."""

_INTEGER_LIMITS = {
    ir.DataType.INT4: (-8, 7),
    ir.DataType.UINT4: (0, 15),
}
_IMAGE_DIMS = 4
_NO_CLIP = (ir.DataType.INT16, ir.DataType.UINT16)
"""Integers that Clip does not take: the reals are clipped before they are quantized."""
_DYNAMIC_RANGES = ((ir.DataType.UINT8, 0, 255), (ir.DataType.INT8, -128, 127))
_FOUR_BIT = {ir.DataType.INT8: ir.DataType.INT4, ir.DataType.UINT8: ir.DataType.UINT4}


def translation_table() -> dict[Callable[..., object], Callable[..., object]]:
    """Operator overload to translation, as `custom_translation_table` takes it."""
    decomposed = torch.ops.quantized_decomposed
    return {
        decomposed.quantize_per_tensor.default: quantize_per_tensor,
        decomposed.quantize_per_tensor.tensor: quantize_per_tensor,
        decomposed.dequantize_per_tensor.default: dequantize_per_tensor,
        decomposed.dequantize_per_tensor.tensor: dequantize_per_tensor,
        decomposed.quantize_per_channel.default: quantize_per_channel,
        decomposed.dequantize_per_channel.default: dequantize_per_channel,
        decomposed.dequantize_per_channel_group.default: dequantize_per_channel_group,
        decomposed.choose_qparams.tensor: choose_qparams,
        torch.ops.aten.log1p.default: log1p,
        torch.ops.aten.pixel_unshuffle.default: pixel_unshuffle,
        torch.ops.higher_order.map_impl: map_rows,
        torch.ops.higher_order.while_loop: while_loop,
        **per_token_translations(),
        **format_translations(),
        **idiom_translations(),
        **reduction_translations(),
        **activation_translations(),
        **recurrent_translations(),
        **expert_translations(),
    }


def pixel_unshuffle(x: ir.Value, downscale_factor: int) -> ir.Value:
    """SpaceToDepth, whose channels are sorted by pixel first; see `blocks_as_depth`."""
    assert x.shape is not None
    rank = len(x.shape)
    if rank != _IMAGE_DIMS:
        leading, image = (op.Shape(x, **span) for span in ({"end": -3}, {"start": -3}))
        x = op.Reshape(x, op.Concat(op.Constant(value_ints=[-1]), image, axis=0))
    depth = op.SpaceToDepth(x, blocksize=downscale_factor)
    channels = op.Squeeze(op.Shape(depth, start=1, end=2))
    places = op.Reshape(op.Range(0, channels, 1), [downscale_factor**2, -1])
    made = op.Gather(depth, op.Reshape(op.Transpose(places, perm=[1, 0]), [-1]), axis=1)
    if rank != _IMAGE_DIMS:
        made = op.Reshape(made, op.Concat(leading, op.Shape(made, start=1), axis=0))
    return typed(made)


def map_rows(
    body: ir.Function, rows: Sequence[ir.Value], operands: Sequence[ir.Value]
) -> Sequence[ir.Value]:
    """A Scan that carries nothing from one row to the next."""
    found: Sequence[ir.Value] = higher_order_scan(body, [], rows, operands)
    return found


def while_loop(
    condition: ir.Function,
    body: ir.Function,
    carried: Sequence[ir.Value | int | float],
    operands: Sequence[ir.Value],
) -> Sequence[ir.Value]:
    """A Loop.

    torch gives its first call of the condition another version than calls of other bodies, and
    onnx_ir then inlines no body that calls one itself.
    """
    found: Sequence[ir.Value] = higher_order_while_loop(condition, body, carried, operands)
    loop = found[0].producer()
    first = None if loop is None else loop.inputs[1]
    call = None if first is None else first.producer()
    if call is not None:
        call.version = None
    return found


def quantize_per_tensor(
    x: ir.Value,
    scale: float | ir.Value,
    zero_point: int | ir.Value,
    quant_min: int,
    quant_max: int,
    dtype: ir.DataType,
) -> ir.Value:
    """QuantizeLinear, and a Clip on the integers where the range is narrower than the type."""
    dynamic = _dynamic_quantize(x, scale)
    if dynamic is not None:
        return dynamic
    x = _single(x)
    if (
        dtype in _NO_CLIP
        and (quant_min, quant_max) != _limits(dtype)
        and not isinstance(scale, ir.Value)
        and not isinstance(zero_point, ir.Value)
    ):
        limits = ((limit - zero_point) * scale for limit in (quant_min, quant_max))
        x = op.Clip(x, *(_real(limit) for limit in limits))
        return typed(op.QuantizeLinear(x, _real(scale), _in_dtype(zero_point, dtype)))
    quantized = op.QuantizeLinear(x, _real(scale), _in_dtype(zero_point, dtype))
    return _narrow(quantized, quant_min, quant_max, dtype)


def dequantize_per_tensor(
    x: ir.Value,
    scale: float | ir.Value,
    zero_point: int | ir.Value,
    quant_min: int,
    quant_max: int,
    dtype: ir.DataType,
    out_dtype: ir.DataType | None = None,
) -> ir.Value:
    """DequantizeLinear; the range needs no care here."""
    if isinstance(zero_point, ir.Value) and _uncast(zero_point) is not zero_point:
        dtype = ir.DataType.UINT8  # the integers are DynamicQuantizeLinear's
    x, dtype = _four_bit(x, quant_min, quant_max, dtype)
    real = op.DequantizeLinear(x, _real(scale), _in_dtype(zero_point, dtype))
    return _as(real, out_dtype)


def quantize_per_channel(
    x: ir.Value,
    scales: ir.Value,
    zero_points: ir.Value,
    axis: int,
    quant_min: int,
    quant_max: int,
    dtype: ir.DataType,
) -> ir.Value:
    """QuantizeLinear along an axis, clipped to a narrower range on the integers."""
    x = _single(x)
    quantized = op.QuantizeLinear(x, _real(scales), _in_dtype(zero_points, dtype), axis=axis)
    return _narrow(quantized, quant_min, quant_max, dtype)


def dequantize_per_channel(
    x: ir.Value,
    scales: ir.Value,
    zero_points: ir.Value | None,
    axis: int,
    quant_min: int,
    quant_max: int,
    dtype: ir.DataType,
    out_dtype: ir.DataType | None = None,
) -> ir.Value:
    """DequantizeLinear along an axis."""
    x, dtype = _four_bit(x, quant_min, quant_max, dtype)
    if zero_points is None:
        return _as(op.DequantizeLinear(x, _real(scales), axis=axis), out_dtype)
    real = op.DequantizeLinear(x, _real(scales), _in_dtype(zero_points, dtype), axis=axis)
    return _as(real, out_dtype)


def dequantize_per_channel_group(
    x: ir.Value,
    scales: ir.Value,
    zero_points: ir.Value | None,
    quant_min: int,
    quant_max: int,
    dtype: ir.DataType,
    group_size: int,
    output_dtype: ir.DataType | None = None,
) -> ir.Value:
    """DequantizeLinear with blocks along the last axis."""
    x, dtype = _four_bit(x, quant_min, quant_max, dtype)
    zeros = [] if zero_points is None else [_in_dtype(zero_points, dtype)]
    real = op.DequantizeLinear(x, _real(scales), *zeros, axis=1, block_size=group_size)
    return _as(real, output_dtype)


def choose_qparams(
    x: ir.Value, quant_min: int, quant_max: int, eps: float, dtype: ir.DataType
) -> tuple[ir.Value, ir.Value]:
    """DynamicQuantizeLinear's scale and zero point; its integers are used by the quantize.

    They are uint8 also where int8 is asked for, with a zero point 128 higher: the same reals.

    Raises:
        NotImplementedError: another type or range than 8 bits in full.
    """
    if (dtype, quant_min, quant_max) not in _DYNAMIC_RANGES:
        raise NotImplementedError(
            f"ONNX quantizes at run time to all integers of 8 bits only, found {dtype} "
            f"[{quant_min}, {quant_max}]"
        )
    _, scale, zero_point = op.DynamicQuantizeLinear(x)
    # torch's operator gives float64 and int64; the quantize looks behind these casts.
    wide = op.Cast(scale, to=ir.DataType.DOUBLE), op.Cast(zero_point, to=ir.DataType.INT64)
    return typed(wide[0]), typed(wide[1])


def log1p(x: ir.Value) -> ir.Value:
    """log(1 + x), to the last bits where 1 + x has lost those of x (Kahan, HP-15C handbook).

    ONNX has none. It is written here because torch's exporter decomposes other functions into it.
    """
    one = _constant(1.0, x)
    whole = op.Add(x, one)
    log = op.Log(whole)
    small = op.Mul(log, op.Div(x, op.Sub(whole, one)))
    return typed(op.Where(op.Greater(x, one), log, op.Where(op.Equal(whole, one), x, small)))


def _dynamic_quantize(x: ir.Value, scale: float | ir.Value) -> ir.Value | None:
    """The integers that DynamicQuantizeLinear made along with this very scale."""
    producer = _uncast(scale).producer() if isinstance(scale, ir.Value) else None
    if producer is None or producer.op_type != "DynamicQuantizeLinear":
        return None
    return producer.outputs[0] if producer.inputs[0] is x else None


def _four_bit(
    x: ir.Value, quant_min: int, quant_max: int, dtype: ir.DataType
) -> tuple[ir.Value, ir.DataType]:
    """A constant whose range fits four bits, in the type that stores it so."""
    narrow = _FOUR_BIT.get(dtype)
    if narrow is None or x.producer() is not None:
        return x, dtype
    low, high = _INTEGER_LIMITS[narrow]
    if quant_min < low or quant_max > high:
        return x, dtype
    return typed(op.Cast(x, to=narrow)), narrow


def _single(x: ir.Value) -> ir.Value:
    """Cast to float32: QuantizeLinear wants the scale in its input's type; scales are float32."""
    is_single = x.dtype in (None, ir.DataType.FLOAT)
    return x if is_single else typed(op.Cast(x, to=ir.DataType.FLOAT))


def _real(scale: float | ir.Value) -> ir.Value:
    return _in_dtype(scale, ir.DataType.FLOAT)


def _in_dtype(value: float | ir.Value, dtype: ir.DataType) -> ir.Value:
    if isinstance(value, ir.Value):
        value = _uncast(value)
        is_same = value.dtype == dtype or value.dtype is None
        return value if is_same else typed(op.Cast(value, to=dtype))
    return typed(op.Constant(value=ir.tensor(np.array(value, dtype.numpy()), dtype=dtype)))


def _uncast(value: ir.Value) -> ir.Value:
    """The output of DynamicQuantizeLinear behind the cast to torch's wider type."""
    cast_node = value.producer()
    source = cast_node.inputs[0] if cast_node is not None and cast_node.op_type == "Cast" else None
    producer = source.producer() if source is not None else None
    if source is None or producer is None or producer.op_type != "DynamicQuantizeLinear":
        return value
    return source


def _limits(dtype: ir.DataType) -> tuple[int, int]:
    if dtype in _INTEGER_LIMITS:
        return _INTEGER_LIMITS[dtype]
    info = np.iinfo(dtype.numpy())
    return int(info.min), int(info.max)


def _narrow(quantized: ir.Value, quant_min: int, quant_max: int, dtype: ir.DataType) -> ir.Value:
    if (quant_min, quant_max) == _limits(dtype):
        return quantized
    return typed(op.Clip(quantized, _in_dtype(quant_min, dtype), _in_dtype(quant_max, dtype)))


def _as(real: ir.Value, dtype: ir.DataType | None) -> ir.Value:
    if dtype is None or dtype in (-1, ir.DataType.FLOAT):
        return real
    return typed(op.Cast(real, to=dtype))


_rotary = mark("RotaryEmbedding", ("x", "start", "cos", "sin"), ("y",), domain=MICROSOFT)


def idiom_translations() -> dict[Any, Callable[..., object]]:
    """Operator overload to translation, as `custom_translation_table` takes it."""
    return {
        RmsNorm: rms_norm,
        AdditiveMask: additive_mask,
        AnySeen: any_seen,
        RotaryEmbedding: rotary_embedding,
        RegroupHeads: regroup_heads,
    }


def rms_norm(x: ir.Value, dims: Sequence[int], eps: float) -> ir.Value:
    """Divide by the root: x / Sqrt(ReduceMean(Pow(x, 2)) + eps).

    ONNX Runtime makes one SimplifiedLayerNormalization of it and a product behind it, but not of
    a product with a reciprocal. One rounding where there were two: a value moves by one and a half
    units in its last place at most.
    """
    squares = op.Pow(x, _constant(2.0, x))
    mean = op.ReduceMean(squares, op.Constant(value_ints=list(dims)), keepdims=1)
    found: ir.Value = op.Div(x, op.Sqrt(op.Add(mean, _constant(eps, x))))
    return found


def additive_mask(seen: ir.Value, low: float, dtype: ir.DataType) -> ir.Value:
    """A choice of two numbers."""
    numbers = (ir.tensor(np.array(value, dtype.numpy())) for value in (0.0, low))
    found: ir.Value = op.Where(seen, *(op.Constant(value=number) for number in numbers))
    return found


def any_seen(seen: ir.Value, dim: int, keepdim: bool, dtype: ir.DataType) -> ir.Value:
    """The greatest of zeros and ones in the type that is wanted."""
    found: ir.Value = op.ReduceMax(
        op.Cast(seen, to=dtype), op.Constant(value_ints=[dim]), keepdims=int(keepdim)
    )
    return found


def rotary_embedding(x: ir.Value, cos: ir.Value, sin: ir.Value) -> ir.Value:
    """ONNX Runtime's own kernel, which may round a product and a sum once in place of twice."""
    found: ir.Value = _rotary(x, op.Constant(value_ints=[0]), cos, sin)
    return found


def regroup_heads(x: ir.Value, heads: int) -> ir.Value:
    """[B, H, T, D] as [B, heads, H * T / heads, D]: a view, whatever the sizes are."""
    found: ir.Value = op.Reshape(x, op.Constant(value_ints=[0, heads, -1, 0]))
    return found


def _constant(value: float, like: ir.Value) -> ir.Value:
    assert like.dtype is not None
    made: ir.Value = op.Constant(value=ir.tensor(np.array(value, like.dtype.numpy())))
    return made
