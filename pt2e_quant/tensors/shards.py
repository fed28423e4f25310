"""Shards of quantized tensors: blank ones, and collectives that fill them.

Rows are cut together with their scales, in the layout that they are stored in. A collective sends
each part as bytes. torch asks a tensor's type about a collective only where the tensor that is
written has one; so `empty_like`, which tensor parallelism receives a shard in, gives a quantized
tensor.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.tensors.quantized_tensor import ATEN, QuantizedTensor
from pt2e_quant.tensors.values import empty_parts

aten = torch.ops.aten


def blank(tensor: QuantizedTensor, shape: tuple[int, ...]) -> QuantizedTensor:
    """A tensor of the same form but for its shape, all of whose bytes are 0."""
    plain = replace(tensor.form.with_layout("plain"), shape=shape)
    parts = empty_parts(plain, tensor.device)
    for name, part in parts.items():
        if name == "table" and part.dim() == 1:
            part.copy_(tensor.parts[name])
        else:
            part.view(torch.uint8).zero_()
    return tensor.like(parts, plain).to_layout(tensor.form.layout)


def empty_like(func: Any, args: Any, kwargs: Any) -> Any:
    """Of the same form, where the dtype is; a float tensor otherwise."""
    tensor = args[0]
    is_same = kwargs.get("dtype") in (None, tensor.dtype) and kwargs.get("device") is None
    if is_same and tensor.form.is_upright and not _is_opaque(tensor):
        return blank(tensor, tensor.form.shape)
    return func(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device), **kwargs)


def pad(func: Any, args: Any, kwargs: Any) -> Any:
    """Blank rows, or columns, at the end."""
    tensor, pads = args[0], args[1]
    grown = [(axis, pads[-2 * axis - 1]) for axis in range(-1, -len(pads) // 2 - 1, -1)]
    grown = [(axis % tensor.dim(), count) for axis, count in grown if count]
    if any(pads[0::2]) or len(grown) != 1 or not tensor.form.is_upright or any(args[2:]):
        return NotImplemented
    ((axis, count),) = grown
    shape = tuple(n + count if i == axis else n for i, n in enumerate(tensor.form.shape))
    made = blank(tensor, shape)
    made.narrow(axis, 0, tensor.shape[axis]).copy_(tensor)
    return made


def by_parts(func: Any, args: Any, kwargs: Any) -> Any:
    """A collective on the bytes of each part. All but the last have ended when it returns.

    Raises:
        UnsupportedError: tensors of several forms, or packed for this machine.
    """
    found = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    first = next(leaf for leaf in found if isinstance(leaf, QuantizedTensor))
    alike = (isinstance(leaf, QuantizedTensor) and leaf.form == first.form for leaf in found)
    if not all(alike) or _is_opaque(first):
        raise UnsupportedError(
            f"{func} is not done on quantized tensors of several forms, or packed for this machine",
            fix='quantize_(model, scheme, layout="plain"), or communicate dequantize()',
        )
    works = []
    for name in first.part_names:

        def bytes_of(tensor: QuantizedTensor, name: str = name) -> Tensor:
            return tensor.parts[name].contiguous().view(torch.uint8)

        own = tree_map_only(QuantizedTensor, bytes_of, args)
        works.append(func(*own, **kwargs)[1])
    for work in works[:-1]:
        work.wait()
    return args[0], works[-1]


def _is_opaque(tensor: QuantizedTensor) -> bool:
    return any(part.is_mkldnn for part in tensor.parts.values())


ATEN[aten.empty_like.default] = empty_like
ATEN[aten.constant_pad_nd.default] = pad
if hasattr(torch.ops.c10d, "scatter_"):  # torch may be built without
    ATEN[torch.ops.c10d.scatter_.default] = by_parts
    ATEN[torch.ops.c10d.broadcast_.default] = by_parts
