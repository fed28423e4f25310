"""What torch.export traces of quantized tensors: a canonical graph's dequantize operators."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.formats import format_ops
from pt2e_quant.core.formats.number_formats import CodeBook, FloatFormat
from pt2e_quant.core.qdq import (
    DequantizePerChannel,
    DequantizePerGroup,
    DequantizePerTensorDynamic,
)
from pt2e_quant.core.qparams import QParams
from pt2e_quant.tensors.form import TensorForm
from pt2e_quant.tensors.values import real_scale, to_qparams

_DATA = Tensor.data.__get__  # type: ignore[attr-defined]  # a getter of torch's
"""It hands out a tensor that the tracer has not seen being made."""


def is_traced_by_export() -> bool:
    """True while torch.export traces operators; it also traces what a compiler has made first."""
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def call_exported(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function of torch on real values, if it does more than turn a weight's axes.

    The tracer follows the parts of parameters and no others: a slice of a weight is one of its
    real values then.
    """

    def real(value: Any) -> Any:
        return value.dequantize() if _is_subclass(value) else value

    if function == _DATA:
        return real(args[0]).detach()  # whose own data the tracer loses
    name = getattr(function, "__name__", "")
    if name.endswith("_") and not name.endswith("__") and not _is_subclass(args[0]):
        args, kwargs = tree_map(real, (args, kwargs))  # it writes another: once
        return function(*args, **kwargs)
    found = function(*args, **kwargs)
    tensors = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
    if all(map(_is_subclass, tensors)) and _parts_of(tensors) <= _parts_of((args, kwargs)):
        return found
    args, kwargs = tree_map(real, (args, kwargs))
    return function(*args, **kwargs)


def _is_subclass(value: Any) -> bool:
    return hasattr(value, "__tensor_flatten__")


def _parts_of(tree: Any) -> set[int]:
    held = [leaf for leaf in tree_leaves(tree) if _is_subclass(leaf)]
    return {id(getattr(leaf, name)) for leaf in held for name in leaf.__tensor_flatten__()[0]}


def emit_values(parts: Mapping[str, Tensor], form: TensorForm) -> Tensor:
    """The real values, in the order of axes that code sees.

    Args:
        parts: in the plain layout.
        form: what they are of.

    Raises:
        ConfigError: the layout is memory of this machine.
    """
    if torch.compiler.is_exporting() and form.layout not in ("plain", "packed"):
        raise ConfigError(
            f'torch.export takes the layouts "plain" and "packed", found "{form.layout}", which is '
            "memory of this machine",
            fix='pq.tensors.pack_(model, "plain") first, or pq.tensors.to_graph(model, args)',
        )
    scheme, codes, block = form.scheme, parts["codes"], list(form.block)
    dtype = {} if form.dtype is torch.float32 else {"out_dtype": form.dtype}
    low, high = scheme.range
    found = to_qparams(parts, form)
    if isinstance(found, QParams):
        limits = (low, high, codes.dtype)
        if found.group_size is not None:
            real = DequantizePerGroup(
                codes, found.scale, found.zero_point, *limits, found.group_size, form.dtype
            )
        elif found.axis is not None:
            zero = found.zero_point.to(torch.int64)
            real = DequantizePerChannel(codes, found.scale, zero, found.axis, *limits, **dtype)
        else:
            zero = found.zero_point.to(torch.int64)
            real = DequantizePerTensorDynamic(codes, found.scale, zero, *limits, **dtype)
    elif isinstance(scheme.format, CodeBook):
        units = real_scale(parts, form) if "scale" in parts else None
        real = format_ops.DequantizeCodeBook(codes, parts["table"], units, block, **dtype)
    elif isinstance(scheme.format, FloatFormat):
        scale = real_scale(parts, form)
        whole = parts.get("tensor_scale")
        real = format_ops.DequantizeFloat(codes, scale, whole, block, scheme.format.name, **dtype)
    else:
        zeros = parts.get("zero_point")
        zeros = None if zeros is None else zeros.to(torch.int32)
        rest = (block, low, high, codes.dtype)
        real = format_ops.DequantizeBlock(codes, real_scale(parts, form), zeros, *rest, **dtype)
    return real.permute(form.axes) if not form.is_upright else real  # type: ignore[no-any-return]
