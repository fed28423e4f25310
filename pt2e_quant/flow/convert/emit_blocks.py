"""Observer node to our own q/dq nodes: blocks of any shape, small floats, code books."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from pt2e_quant.core.dtypes import info
from pt2e_quant.core.formats import format_ops
from pt2e_quant.core.formats.block_qparams import BlockQParams, KeptScale
from pt2e_quant.core.formats.blocks import block_lengths
from pt2e_quant.core.formats.number_formats import CodeBook, FloatFormat
from pt2e_quant.core.formats.scale_format import FLOAT32_SCALES
from pt2e_quant.core.schemes import TensorScheme
from pt2e_quant.flow.convert.emit_qdq import Quantized, qdq_name
from pt2e_quant.graph.editor import Editor

_aten: Any = torch.ops.aten


def emit_blocks(editor: Editor, observer: Node, source: Node, qparams: BlockQParams) -> Quantized:
    """Insert the quantize of an observer whose qparams are constant."""
    base = qdq_name(source)

    def held(suffix: str, tensor: Tensor | None) -> Node | None:
        if tensor is None:
            return None
        return editor.constant(f"{base}_{suffix}", tensor.contiguous(), like=observer)

    scale = None if qparams.scale is None else _scale(editor, observer, qparams.scale, held)
    block = list(qparams.block)
    form = qparams.scheme.format
    if isinstance(form, CodeBook):
        table = held("table", qparams.table)
        return _quantized(
            editor,
            observer,
            source,
            (format_ops.QuantizeCodeBook, format_ops.DequantizeCodeBook),
            (table, scale, block),
        )
    if isinstance(form, FloatFormat):
        whole = None if qparams.scale is None else held("tensor_scale", qparams.scale.tensor_scale)
        return _of_floats(editor, observer, source, (scale, whole, block, form.name))
    zero_point = held("zero_point", qparams.zero_point)
    return _of_integers(editor, observer, source, qparams.scheme, (scale, zero_point, block))


def emit_run_time_scales(
    editor: Editor, observer: Node, source: Node, scheme: TensorScheme
) -> Quantized:
    """Insert choose_scales and the quantize of an observer whose scales are found at run time."""
    dim = observer.meta["val"].dim()
    block = list(block_lengths(scheme.granularity, dim))
    form = scheme.format
    assert form is None or isinstance(form, FloatFormat)  # RunTimeScales refuses code books
    limit = float(scheme.range[1]) if form is None else form.max
    dtype = scheme.scales.dtype

    def choose(units: Node | None, lengths: list[int], greatest: float, kept: torch.dtype) -> Node:
        return editor.call(
            format_ops.ChooseScales,
            source,
            units,
            lengths,
            greatest,
            kept,
            like=observer,
            before=observer,
        )

    whole = None
    if scheme.scales.in_tensor_units:
        of_all = limit * torch.finfo(dtype).max
        whole = choose(None, [-1] * dim, of_all, torch.float32)
    scale = choose(whole, block, limit, dtype)
    if form is None:
        return _of_integers(editor, observer, source, scheme, (scale, None, block))
    return _of_floats(editor, observer, source, (scale, whole, block, form.name))


def described(scheme: TensorScheme, dim: int) -> dict[str, Any]:
    """What a record says of a scheme, by field; scales are too many to say twice."""
    low, high = scheme.range
    scales = "" if scheme.scales == FLOAT32_SCALES else str(scheme.scales)
    named = {} if scheme.format is None else {"dtype": str(scheme.format)}
    return {
        **named,
        "quant_min": low,
        "quant_max": high,
        "block": list(block_lengths(scheme.granularity, dim)),
        "scales": scales,
        "is_dynamic": scheme.is_dynamic,
    }


def _scale(
    editor: Editor,
    observer: Node,
    kept: KeptScale,
    held: Callable[[str, Tensor | None], Node | None],
) -> Node | None:
    """The node of the scales: a constant, or the dequantize of double-quantized ones."""
    if kept.steps is None:
        return held("scale", kept.values)

    def call(target: Any, *arguments: Any) -> Node:
        return editor.call(target, *arguments, like=observer, before=observer)

    codes, steps = held("scale_codes", kept.values.reshape(-1)), held("scale_steps", kept.steps)
    flat = call(format_ops.DequantizeBlock, codes, steps, None, [kept.group], 0, 255, torch.uint8)
    return call(_aten.view.default, flat, list(kept.values.shape))


def _of_integers(
    editor: Editor, observer: Node, source: Node, scheme: TensorScheme, head: tuple[Any, ...]
) -> Quantized:
    pair = format_ops.QuantizeBlock, format_ops.DequantizeBlock
    limits = (*scheme.range, info(scheme.dtype).storage)
    return _quantized(editor, observer, source, pair, (*head, *limits))


def _of_floats(
    editor: Editor, observer: Node, source: Node, arguments: tuple[Any, ...]
) -> Quantized:
    pair = format_ops.QuantizeFloat, format_ops.DequantizeFloat
    return _quantized(editor, observer, source, pair, arguments)


def _quantized(
    editor: Editor, observer: Node, source: Node, pair: tuple[Any, Any], arguments: tuple[Any, ...]
) -> Quantized:
    node = editor.call(pair[0], source, *arguments, like=observer, before=observer)
    return Quantized(node, pair[1], arguments)
