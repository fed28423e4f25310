"""Observer node to q/dq nodes, in each of the canonical layouts."""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from pt2e_quant.core.dtypes import info, limits_of, used_limits
from pt2e_quant.core.formats import format_ops
from pt2e_quant.core.formats.block_qparams import BlockQParams, KeptScale
from pt2e_quant.core.formats.blocks import block_lengths
from pt2e_quant.core.formats.number_formats import CodeBook, FloatFormat
from pt2e_quant.core.formats.scale_format import FLOAT32_SCALES
from pt2e_quant.core.qdq import (
    ChoosePerToken,
    DequantizePerChannel,
    DequantizePerGroup,
    DequantizePerTensor,
    DequantizePerToken,
    QuantizePerChannel,
    QuantizePerGroup,
    QuantizePerTensor,
    QuantizePerToken,
)
from pt2e_quant.core.qparams import QParams
from pt2e_quant.core.schemes import TensorScheme
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import fake_cast
from pt2e_quant.passes.weights.store_weights import qdq_name

_lib = torch.ops.quantized_decomposed


@dataclass(frozen=True, slots=True)
class Quantized:
    """A quantize node, and how to dequantize it.

    Args:
        node: the quantize.
        undo: the dequantize op.
        arguments: of both, after their tensor.
        names_dtype: the dequantize takes the dtype it gives as its last argument; the others
            take it as a keyword, and give float32 without.
    """

    node: Node
    undo: Any
    arguments: tuple[Any, ...]
    names_dtype: bool = False

    def dequantize(self, editor: Editor, *, of: Node, like: Node | None = None) -> Node:
        """Insert a dequantize for one reader of the value.

        Args:
            editor: inserts it.
            of: the observer node or constant that it stands for, and before which it stands.
            like: the node whose module stack and stack trace it takes; `of` if None.
        """
        value = of.meta["val"]
        last = (value.dtype,) if self.names_dtype else ()
        keyword = not self.names_dtype and value.dtype is not torch.float32
        named = {"out_dtype": value.dtype} if keyword else {}
        arguments = (*self.arguments, *last)
        return editor.call(
            self.undo, self.node, *arguments, like=like or of, before=of, val=value, **named
        )


@dataclass(frozen=True, slots=True)
class Layout:
    """The operators of static qparams, and what both take after their tensor."""

    do: Any
    undo: Any
    arguments: tuple[Any, ...]
    names_dtype: bool = False

    def of(self, node: Node) -> Quantized:
        """The quantized value whose integers are at a node."""
        return Quantized(node, self.undo, self.arguments, self.names_dtype)


def static_layout(editor: Editor, base: str, qparams: QParams, *, like: Node) -> Layout:
    """The layout of qparams, with the constants that it needs.

    Args:
        editor: makes the constants.
        base: their names begin with it.
        qparams: of a tensor, its channels or groups.
        like: the node whose module stack and stack trace the constants take.
    """
    limits = (qparams.quant_min, qparams.quant_max, limits_of(qparams.dtype).storage)
    if qparams.is_per_tensor:
        plain = (qparams.scale_float, qparams.zero_point_int, *limits)
        return Layout(QuantizePerTensor, DequantizePerTensor, plain)
    scale = editor.constant(f"{base}_scale", qparams.scale, like=like)
    zero_point = editor.constant(f"{base}_zero_point", _held(qparams), like=like)
    if qparams.group_size is not None:
        grouped = (scale, zero_point, *limits, qparams.group_size)
        return Layout(QuantizePerGroup, DequantizePerGroup, grouped, names_dtype=True)
    along = (scale, zero_point, qparams.axis, *limits)
    return Layout(QuantizePerChannel, DequantizePerChannel, along)


def emit_static(editor: Editor, observer: Node, source: Node, qparams: QParams) -> Quantized:
    """Insert the quantize of a static observer."""
    layout = static_layout(editor, qdq_name(source), qparams, like=observer)
    value = editor.fake_like(observer.meta["val"], limits_of(qparams.dtype).storage)
    made = editor.call(
        layout.do, source, *layout.arguments, like=observer, before=observer, val=value
    )
    return layout.of(made)


def _held(qparams: QParams) -> Tensor:
    """The zero_points as a graph holds them."""
    if qparams.zero_point.is_floating_point() or qparams.group_size is not None:
        return qparams.zero_point
    # int64: ExecuTorch's portable dequantize_per_channel reads these bytes as such.
    return qparams.zero_point.to(torch.int64)


def emit_dynamic(editor: Editor, observer: Node, source: Node, module: Any) -> Quantized:
    """Insert choose_qparams and quantize of a dynamic observer, per tensor or per token."""

    def call(target: Any, *args: Any) -> Node:
        return editor.call(target, *args, like=observer, before=observer)

    if getattr(module, "is_per_token", False):
        both = call(ChoosePerToken, source, module.dtype)
        scale, zero_point = call(operator.getitem, both, 0), call(operator.getitem, both, 1)
        of_rows = (scale, zero_point, module.quant_min, module.quant_max, module.dtype)
        made = call(QuantizePerToken, source, *of_rows)
        return Quantized(made, DequantizePerToken, of_rows, names_dtype=True)
    limits, (low, high) = info(module.dtype), used_limits(module)
    eps = float(getattr(module, "eps", torch.finfo(torch.float32).eps))
    is_symmetric = module.qscheme == torch.per_tensor_symmetric
    choose = _lib.choose_qparams_symmetric.tensor if is_symmetric else _lib.choose_qparams.tensor
    both = call(choose, source, low, high, eps, module.dtype)
    scale, zero_point = call(operator.getitem, both, 0), call(operator.getitem, both, 1)
    arguments = (scale, zero_point, low, high, limits.storage)
    made = call(_lib.quantize_per_tensor.tensor, source, *arguments)
    return Quantized(made, _lib.dequantize_per_tensor.tensor, arguments)


def is_affine_choice(module: Any) -> bool:
    """True if a dynamic observer's qparams are affine, of the whole tensor.

    torchao's PT2E gives all readers of such a tensor one dequantize.
    """
    is_per_token = getattr(module, "is_per_token", False)
    return not is_per_token and module.qscheme != torch.per_tensor_symmetric


def emit_casts(editor: Editor, observer: Node, source: Node, dtype: torch.dtype) -> Node:
    """Insert a cast to a float dtype and back, which no compiler may fuse away; returns the last.

    The operator is torch's `convert_element_type.no_fuse`.
    """
    cast = _lib.convert_element_type.no_fuse
    value = observer.meta["val"]
    narrow = editor.call(
        cast, source, dtype, like=observer, before=observer, val=fake_cast(value, dtype)
    )
    return editor.call(cast, narrow, value.dtype, like=observer, before=observer, val=value)


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
    """The fields of a record that describe a scheme; scales are in the graph, not in records."""
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
