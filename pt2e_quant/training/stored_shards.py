"""Shards of parameters that are stored as codes: what FSDP2 and tensor parallelism ask of them.

Rows are cut together with their scales, in the layout that they are stored in. FSDP2 gathers the
codes and scales, as bytes; no rank holds real values of a weight between steps.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.core.formats.blocks import WHOLE
from pt2e_quant.tensors.quantized_tensor import ATEN, QuantizedTensor
from pt2e_quant.tensors.shards import blank

_aten = torch.ops.aten


def _new(func: Any, args: Any, kwargs: Any) -> Any:
    """FSDP2 copies its shard into zeros."""
    tensor, shape = args[0], tuple(args[1])
    is_other = len(shape) != tensor.dim() or kwargs.get("dtype") not in (None, tensor.dtype)
    if is_other:
        return NotImplemented
    if reason := _refusal(tensor, shape):
        raise UnsupportedError(
            f"a parameter stored as {tensor.scheme} is not sharded: {reason}",
            fix="shard the model with float parameters, or train each rank's copy whole",
        )
    return _shard(tensor, shape)


def _shard(tensor: QuantizedTensor, shape: tuple[int, ...]) -> QuantizedTensor:
    asked = getattr(tensor, "own_grad_dtype", None)
    if asked not in (None, tensor.dtype):
        raise UnsupportedError(
            f"the gradient of a shard has the parameter's dtype, {tensor.dtype}, not {asked}",
            fix="leave grad_dtype out; fully_shard has MixedPrecisionPolicy(reduce_dtype=…)",
        )
    return blank(tensor, shape)


def _refusal(tensor: QuantizedTensor, shape: tuple[int, ...]) -> str:
    form = tensor.form
    of_all = {"steps", "tensor_scale"} & set(tensor.part_names)
    reasons = (
        (bool(of_all), "its scales have a unit of the whole tensor"),
        (form.block[0] != 1, "rows share scales"),
        (shape[1:] != form.shape[1:] or not form.is_upright, "only rows are cut"),
    )
    return next((text for holds, text in reasons if holds), "")


def _empty_like(func: Any, args: Any, kwargs: Any) -> Any:
    """Tensor parallelism receives its shard there."""
    tensor = args[0]
    if kwargs.get("dtype") not in (None, tensor.dtype) or not tensor.form.is_upright:
        return NotImplemented
    return _shard(tensor, tensor.form.shape)


def _split(func: Any, args: Any, kwargs: Any) -> Any:
    made = ATEN[func](func, args, kwargs)
    if not all(isinstance(part, QuantizedTensor) for part in made):
        raise UnsupportedError(
            f"pieces of a parameter stored as {args[0].scheme} would cut its blocks of scales",
            fix="pieces of whole blocks, or dequantize() first",
        )
    return made


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    """FSDP2 keeps a flat view of its shard. It is of no use there, and would be a float copy."""
    tensor, shape = args[0], list(args[1])
    if tensor.dim() != 1 and shape in ([-1], [tensor.numel()]):
        return FlatView(tensor)
    return ATEN[func](func, args, kwargs)


SHARDING: Mapping[Any, Callable[..., Any]] = {
    _aten.new_zeros.default: _new,
    _aten.empty_like.default: _empty_like,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split,
    _aten.view.default: _view,
}
"""Operators that make shards of stored parameters; each may give `NotImplemented`."""


class FlatView(torch.Tensor):
    """The real values of a tensor in one axis, computed when they are read.

    Args:
        source: the tensor.
    """

    source: QuantizedTensor

    @staticmethod
    def __new__(cls, source: QuantizedTensor) -> "FlatView":
        """Wrap a tensor, which is shared."""
        made: FlatView = torch.Tensor._make_wrapper_subclass(
            cls, (source.numel(),), dtype=source.dtype, device=source.device
        )
        made.source = source
        return made

    def __init__(self, source: QuantizedTensor) -> None:
        pass

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares its default as a function
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is _aten.detach.default:
            return FlatView(args[0].source)
        if func._schema.is_mutable and isinstance(args[0], FlatView):
            raise UnsupportedError("a flat view of codes is not written", fix="write the tensor")
        real = tree_map_only(
            FlatView, lambda view: view.source.dequantize().reshape(-1), (args, kwargs or {})
        )
        return func(*real[0], **real[1])


# ---- FSDP2 ----


def _of_rows(tensor: QuantizedTensor) -> dict[str, Tensor]:
    """The parts of which each row has its own; a table of constants belongs to all."""
    return {n: p for n, p in tensor.parts.items() if n != "table" or p.dim() > 1}


def bytes_to_gather(
    tensor: QuantizedTensor, count: int, whole: torch.Size
) -> tuple[tuple[Tensor, ...], torch.Size]:
    """The bytes of a shard's rows, and the shape that the shards have together.

    Args:
        tensor: the shard.
        count: the number of shards.
        whole: the shape of all of them.
    """
    rows, own = -(-whole[0] // count), tensor.form.shape
    flat = [
        part.reshape(own[0], math.prod(part.shape[1:])).view(torch.uint8)
        for part in _of_rows(tensor).values()
    ]
    joined = torch.cat(flat, 1)
    if whole[0] % count == 0:
        return (joined,), whole
    # FSDP2 takes tensors of the padded shard's shape alone where shards are not of one size.
    width = math.prod(own[1:])
    missing = (0, -joined.shape[1] % width, 0, rows - own[0])
    pieces = torch.split(torch.nn.functional.pad(joined, missing), width, 1)
    return tuple(piece.contiguous().view(rows, *own[1:]) for piece in pieces), whole


def join_bytes(
    tensor: QuantizedTensor, gathered: tuple[Tensor, ...], whole: torch.Size, dtype: torch.dtype
) -> tuple[QuantizedTensor, tuple[Tensor, ...]]:
    """The tensor whose shards' bytes were gathered, and the parts that are memory of its own.

    Args:
        tensor: a shard.
        gathered: what ranks gave by `bytes_to_gather`.
        whole: its shape.
        dtype: that code is to see.
    """
    joined = torch.cat([piece.reshape(len(piece), -1) for piece in gathered], 1)[: whole[0]]
    parts, start = tensor.parts, 0
    for name, part in _of_rows(tensor).items():
        shape = (whole[0], *part.shape[1:])
        end = start + math.prod(shape[1:]) * part.element_size()
        own = joined[:, start:end].clone(memory_format=torch.contiguous_format)
        parts[name], start = own.view(part.dtype).view(shape), end
    made = tensor.like(parts, replace(tensor.form, shape=tuple(whole), dtype=dtype))
    return made, tuple(_of_rows(made).values())


# ---- the optimizer's step ----


def real_values(param: Tensor) -> Tensor:
    """The real values of a parameter, of a DTensor as a DTensor."""
    if isinstance(param, QuantizedTensor):
        return param.dequantize()
    if isinstance(param, DTensor) and isinstance(param._local_tensor, QuantizedTensor):
        return DTensor.from_local(
            param._local_tensor.dequantize(),
            param.device_mesh,
            param.placements,
            run_check=False,
            shape=param.shape,
            stride=param.stride(),
        )
    return param


def extremes_of_whole(param: DTensor, values: Tensor) -> Tensor:
    """The numbers for the scales of a shard: its values, or the extremes on all ranks.

    A scale of a row that ranks share is the scale of the whole row.

    Args:
        param: whose local tensor is quantized.
        values: the real values of the local tensor.
    """
    stored = param._local_tensor
    assert isinstance(stored, QuantizedTensor)
    for at, placement in enumerate(param.placements):
        axis = getattr(placement, "dim", None)  # of shards
        if axis is None or stored.form.block[axis] != WHOLE:
            continue
        ends = []
        for reduce, op, none in (
            (torch.amin, dist.ReduceOp.MIN, math.inf),
            (torch.amax, dist.ReduceOp.MAX, -math.inf),
        ):
            shape = [1 if i == axis else n for i, n in enumerate(values.shape)]
            is_empty = values.shape[axis] == 0
            end = values.new_full(shape, none) if is_empty else reduce(values, axis, keepdim=True)
            dist.all_reduce(end, op, param.device_mesh.get_group(at))
            ends.append(end)
        values = torch.cat(ends, axis)
    return values
