"""Observer node to q/dq nodes, in each of the canonical layouts."""

import operator
from typing import Any

import torch
from torch.fx import Node

from pt2e_quant.core.dtypes import info
from pt2e_quant.core.qdq import (
    DequantizePerChannel,
    DequantizePerTensor,
    QuantizePerChannel,
    QuantizePerTensor,
)
from pt2e_quant.core.qparams import QParams
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import fake_cast, source_constant

__all__ = ["QdqArguments", "emit_casts", "emit_dynamic", "emit_static", "qdq_name"]

_lib = torch.ops.quantized_decomposed

QdqArguments = tuple[Any, ...]
"""What a q/dq op takes after its tensor."""


def qdq_name(source: Node) -> str:
    """The dotted name that the qparams of a node are stored under, before the suffix."""
    constant = source_constant(source)
    return source.name if constant is None else str(constant.target)


def emit_static(
    editor: Editor, observer: Node, source: Node, qparams: QParams
) -> tuple[Node, Any, QdqArguments]:
    """Insert the quantize of a static observer.

    Returns:
        The quantize node, the dequantize op that undoes it, and that op's further arguments.
    """
    storage = info(qparams.dtype).storage
    limits = (qparams.quant_min, qparams.quant_max, storage)
    if qparams.axis is None:
        arguments: QdqArguments = (qparams.scale_float, qparams.zero_point_int, *limits)
        quantize, dequantize = QuantizePerTensor, DequantizePerTensor
    else:
        base = qdq_name(source)
        scale = editor.constant(f"{base}_scale", qparams.scale, like=observer)
        # int64: ExecuTorch's portable dequantize_per_channel reads these bytes as such.
        held = qparams.zero_point
        held = held if held.is_floating_point() else held.to(torch.int64)
        zero_point = editor.constant(f"{base}_zero_point", held, like=observer)
        arguments = (scale, zero_point, qparams.axis, *limits)
        quantize, dequantize = QuantizePerChannel, DequantizePerChannel
    value = editor.fake_like(observer.meta["val"], storage)
    made = editor.call(quantize, source, *arguments, like=observer, before=observer, val=value)
    return made, dequantize, arguments


def emit_dynamic(
    editor: Editor, observer: Node, source: Node, module: Any
) -> tuple[Node, Any, QdqArguments]:
    """Insert choose_qparams and quantize of a dynamic per-tensor observer; returns as above."""
    limits = info(module.dtype)
    low = limits.quant_min if module.quant_min is None else int(module.quant_min)
    high = limits.quant_max if module.quant_max is None else int(module.quant_max)
    eps = float(getattr(module, "eps", torch.finfo(torch.float32).eps))
    is_symmetric = module.qscheme == torch.per_tensor_symmetric
    choose = _lib.choose_qparams_symmetric.tensor if is_symmetric else _lib.choose_qparams.tensor

    def call(target: Any, *args: Any) -> Node:
        return editor.call(target, *args, like=observer, before=observer)

    both = call(choose, source, low, high, eps, module.dtype)
    scale, zero_point = call(operator.getitem, both, 0), call(operator.getitem, both, 1)
    arguments = (scale, zero_point, low, high, limits.storage)
    return (
        call(_lib.quantize_per_tensor.tensor, source, *arguments),
        (_lib.dequantize_per_tensor.tensor),
        arguments,
    )


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
