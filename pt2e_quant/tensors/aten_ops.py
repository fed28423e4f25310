"""ATen operators that keep a quantized tensor quantized."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pt2e_quant.core.formats.blocks import WHOLE
from pt2e_quant.core.formats.scale_format import FLOAT32_SCALES
from pt2e_quant.core.packing import unpack
from pt2e_quant.tensors.exporting import is_traced_by_export
from pt2e_quant.tensors.kernels.fallbacks import note_fallback
from pt2e_quant.tensors.layouts.layout import code_dtype
from pt2e_quant.tensors.layouts.table import layout_named
from pt2e_quant.tensors.quantized_tensor import ATEN, QuantizedTensor, changed_parts
from pt2e_quant.tensors.values import Parts, decode, empty_parts, real_scale

aten = torch.ops.aten


def _handles(*ops: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(handler: Callable[..., Any]) -> Callable[..., Any]:
        for op in ops:
            ATEN[op] = handler
        return handler

    return register


def _portable(tensor: QuantizedTensor) -> QuantizedTensor:
    """The tensor with parts that any operator takes: opaque ones are unpacked."""
    is_opaque = any(part.is_mkldnn for part in tensor.parts.values())
    return tensor.to_layout("plain") if is_opaque else tensor


@_handles(aten.detach.default, aten.alias.default, aten.lift_fresh.default)
def _alias(func: Any, args: Any, kwargs: Any) -> Any:
    # A tracer knows the parts of parameters: it does not see `weight.data` being made.
    traced = is_traced_by_export()
    made = changed_parts(args[0], lambda p: p if traced or p.is_mkldnn else p.detach())
    if traced or any(part.is_mkldnn for part in made.parts.values()):
        made.alias_of = args[0]
    return made


@_handles(aten.clone.default)
def _clone(func: Any, args: Any, kwargs: Any) -> Any:
    return changed_parts(args[0], torch.clone)


@_handles(aten._to_copy.default)
def _to_copy(func: Any, args: Any, kwargs: Any) -> Any:
    tensor, given = args[0], dict(kwargs)
    dtype = given.pop("dtype", None) or tensor.dtype
    if not dtype.is_floating_point:
        return NotImplemented
    given.pop("layout", None)
    given.pop("memory_format", None)
    device = given.get("device")
    if device is not None and torch.device(device) != tensor.device:
        tensor = _portable(tensor)
    if device is not None and torch.device(device).type == "meta":
        form = replace(tensor.form, dtype=dtype)
        plain = tensor.like(empty_parts(form, torch.device("meta")), form.with_layout("plain"))
        return plain.to_layout("packed") if form.layout == "packed" else plain

    def copied(part: Tensor) -> Tensor:
        return part.clone() if part.is_mkldnn else part.to(**given, copy=True)

    made = changed_parts(tensor, copied, dtype=dtype)
    layout = tensor.form.layout
    if made.device.type != tensor.device.type and layout_named(layout).is_of_device:
        return made.to_layout("plain").to_layout(layout)
    return made


@_handles(aten._pin_memory.default)
def _pin(func: Any, args: Any, kwargs: Any) -> Any:
    return changed_parts(args[0], lambda part: part.pin_memory())


@_handles(aten.copy_.default)
def _copy(func: Any, args: Any, kwargs: Any) -> Any:
    """Codes are copied as they are between equal forms; real values are quantized anew."""
    into, source = args[0], args[1]
    if not isinstance(into, QuantizedTensor):
        into.copy_(source.dequantize())
        return into
    if isinstance(source, QuantizedTensor):
        same = replace(source.form, dtype=into.dtype, layout="plain", input=into.form.input)
        if same == into.form.with_layout("plain"):
            if source.form.layout != into.form.layout:
                source = source.to_layout("plain").to_layout(into.form.layout)
            for name, part in source.parts.items():
                if part.is_mkldnn:
                    into.replace_part(name, part)
                else:
                    getattr(into, name).copy_(part)
            return into
        note_fallback("aten.copy_", f"{source.form.scheme} into {into.form.scheme}")
        source = source.dequantize()
    into.requantize_(source.expand(into.shape))
    return into


@_handles(aten.t.default)
def _t(func: Any, args: Any, kwargs: Any) -> Any:
    return _permuted(args[0], list(range(args[0].dim()))[::-1])


@_handles(aten.transpose.int)
def _transpose(func: Any, args: Any, kwargs: Any) -> Any:
    tensor, first, second = args
    order = list(range(tensor.dim()))
    first, second = first % tensor.dim(), second % tensor.dim()
    order[first], order[second] = order[second], order[first]
    return _permuted(tensor, order)


@_handles(aten.permute.default)
def _permute(func: Any, args: Any, kwargs: Any) -> Any:
    return _permuted(args[0], [dim % args[0].dim() for dim in args[1]])


def _permuted(tensor: QuantizedTensor, order: Sequence[int]) -> QuantizedTensor:
    axes = tuple(tensor.form.axes[dim] for dim in order)
    return tensor.like(tensor.parts, replace(tensor.form, axes=axes))


@_handles(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default)
def _view(func: Any, args: Any, kwargs: Any) -> Any:
    tensor, sizes = args[0], list(args[1])
    known = [size if size != -1 else tensor.numel() for size in sizes]
    if func is not aten.expand.default and -1 in sizes:
        rest = max(1, abs(torch.Size([s for s in sizes if s != -1]).numel()))
        known = [tensor.numel() // rest if size == -1 else size for size in sizes]
    if func is aten.expand.default:
        known = [s if s != -1 else own for s, own in zip(sizes, tensor.shape, strict=False)]
    if tuple(known) != tuple(tensor.shape):
        return NotImplemented
    return _alias(func, args, kwargs)


@_handles(aten.as_strided.default)
def _as_strided(func: Any, args: Any, kwargs: Any) -> Any:
    tensor, sizes, strides, *offset = args
    is_same = tuple(sizes) == tuple(tensor.shape) and tuple(strides) == tuple(tensor.stride())
    if not is_same or any(offset):
        return NotImplemented
    return _alias(func, args, kwargs)


@_handles(aten.slice.Tensor)
def _slice(func: Any, args: Any, kwargs: Any) -> Any:
    tensor, dim, start, end, step = (*args, *(None,) * (5 - len(args)))[:5]
    dim = 0 if dim is None else dim
    size = tensor.shape[dim]
    first = min(max((start or 0) + (size if (start or 0) < 0 else 0), 0), size)
    last = size if end is None else min(max(end + (size if end < 0 else 0), first), size)
    return _sliced(tensor, dim, first, last, 1 if step is None else step)


@_handles(aten.narrow.default)
def _narrow(func: Any, args: Any, kwargs: Any) -> Any:
    tensor, dim, start, length = args
    return _sliced(tensor, dim, start, start + length, 1)


def _sliced(tensor: QuantizedTensor, dim: int, start: int, end: int, step: int) -> Any:
    """A run of an axis, as views of the parts; none where it would cut a block."""
    form = tensor.form
    axis = form.axes[dim % tensor.dim()]
    size, length = form.shape[axis], form.block[axis]
    if (start, end, step) == (0, size, 1):
        return _alias(None, (tensor,), {})
    is_cut = length > 1 and (start % length or (end % length and end != size))
    if step != 1 or is_cut:
        note_fallback("aten.slice", f"a run from {start} to {end} by {step} cuts a block of scales")
        return tensor.dequantize()[
            (slice(None),) * (dim % tensor.dim()) + (slice(start, end, step),)
        ]
    shape = tuple(end - start if i == axis else n for i, n in enumerate(form.shape))
    places = _packed_places(tensor, axis, start, end)
    parts, layout = (_flat_scales(tensor), "plain") if places is None else (tensor.parts, "packed")
    made = {name: _cut(name, part, axis, length, start, end) for name, part in parts.items()}
    if places is not None:
        made["packed"] = aten.slice.Tensor(parts["packed"], *places)
    scheme = _without_steps(form.scheme) if "steps" in tensor.part_names else form.scheme
    return tensor.like(made, replace(form, shape=shape, layout=layout, scheme=scheme))


def _packed_places(
    tensor: QuantizedTensor, axis: int, start: int, end: int
) -> tuple[int, int, int] | None:
    """Dimension, start and end of a run in packed codes; none if it is not of whole bytes."""
    shape, bits = tensor.form.shape, tensor.form.scheme.bits
    if tensor.form.layout != "packed" or "steps" in tensor.part_names:
        return None
    if axis == 0 and len(shape) > 1:
        return 0, start, end
    is_cut = start * bits % 8 or (end * bits % 8 and end != shape[axis])
    if len(shape) > 2 or is_cut:
        return None
    return axis, start * bits // 8, -(-end * bits // 8)


def _without_steps(scheme: Any) -> Any:
    """Double-quantized scales of a part are kept as the float32 that they stand for."""
    return replace(scheme, scales=FLOAT32_SCALES)


def _flat_scales(tensor: QuantizedTensor) -> Parts:
    parts = tensor.plain_parts()
    if "steps" not in parts:
        return parts
    from_steps = tensor_scales(tensor)
    return {n: p for n, p in parts.items() if n not in ("scale", "steps")} | {"scale": from_steps}


def tensor_scales(tensor: QuantizedTensor) -> Tensor:
    """The scales in force, float32 of the grid."""
    return real_scale(tensor.plain_parts(), tensor.form)


def _cut(name: str, part: Tensor, axis: int, length: int, start: int, end: int) -> Tensor:
    if name == "codes":
        return aten.slice.Tensor(part, axis, start, end)  # type: ignore[no-any-return]
    is_of_grid = name in ("scale", "zero_point") or (name == "table" and part.dim() > 1)
    if not is_of_grid or length == WHOLE:
        return part
    last = -(-end // length)
    return aten.slice.Tensor(part, axis, start // length, last)  # type: ignore[no-any-return]


@_handles(aten.split.Tensor, aten.chunk.default)
def _split(func: Any, args: Any, kwargs: Any) -> Any:
    tensor, size = args[0], args[1]
    dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
    total = tensor.shape[dim]
    if func is aten.chunk.default:
        size = -(-total // size)
    starts = range(0, max(total, 1), size)
    return _pieces(tensor, dim, [(start, min(start + size, total)) for start in starts])


@_handles(aten.split_with_sizes.default)
def _split_with_sizes(func: Any, args: Any, kwargs: Any) -> Any:
    tensor, sizes = args[0], args[1]
    dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
    ends = itertools.accumulate(sizes, initial=0)
    return _pieces(tensor, dim, list(itertools.pairwise(ends)))


def _pieces(
    tensor: QuantizedTensor, dim: int, places: Sequence[tuple[int, int]]
) -> Sequence[Tensor]:
    """Each quantized, or none, where a cut goes through a block of scales: ranks get one each."""
    made = [_sliced(tensor, dim, start, end, 1) for start, end in places]
    if all(isinstance(piece, QuantizedTensor) for piece in made):
        return made
    return [piece.dequantize() if isinstance(piece, QuantizedTensor) else piece for piece in made]


@_handles(aten.cat.default)
def _cat(func: Any, args: Any, kwargs: Any) -> Any:
    """Tensors of one scheme along an axis whose blocks they fill."""
    tensors = args[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    first = tensors[0]
    if not all(isinstance(t, QuantizedTensor) for t in tensors):
        return NotImplemented
    form = first.form
    axis = form.axes[dim % first.dim()]
    length = form.block[axis]
    alike = all(
        t.form.scheme == form.scheme and t.form.axes == form.axes and t.dtype == form.dtype
        for t in tensors
    )
    whole_blocks = length != WHOLE and all(t.form.shape[axis] % length == 0 for t in tensors[:-1])
    one_of_all = {"tensor_scale", "steps"} & set(first.part_names)
    if not alike or not whole_blocks or one_of_all:
        return NotImplemented
    plain = [t.plain_parts() for t in tensors]
    is_grid = {"codes", "scale", "zero_point"} | (
        {"table"} if "table" in plain[0] and plain[0]["table"].dim() > 1 else set()
    )
    parts = {
        name: aten.cat.default([p[name] for p in plain], axis) if name in is_grid else value
        for name, value in plain[0].items()
    }
    joined = sum(t.form.shape[axis] for t in tensors)
    shape = tuple(joined if i == axis else n for i, n in enumerate(form.shape))
    return first.like(parts, replace(form, shape=shape, layout="plain"))


@_handles(aten.zeros_like.default)
def _like(func: Any, args: Any, kwargs: Any) -> Any:
    """Return a float tensor of the shape: for gradients and optimizer states."""
    like = torch.empty(args[0].shape, dtype=args[0].dtype, device=args[0].device)
    return func(like, **kwargs)


@_handles(aten.embedding.default)
def _embedding(func: Any, args: Any, kwargs: Any) -> Any:
    table, places = args[0], args[1]
    if not isinstance(table, QuantizedTensor) or not table.form.is_upright:
        return NotImplemented
    return rows_of(table, places)


def rows_of(table: QuantizedTensor, places: Tensor) -> Tensor:
    """The real values of rows of a matrix: codes are gathered first, where blocks allow."""
    form = table.form
    block = form.block
    if len(form.shape) != 2 or block[0] > 1 or "steps" in table.part_names:
        return aten.embedding.default(table.dequantize(), places)  # type: ignore[no-any-return]
    flat = places.reshape(-1)
    if form.layout == "packed":
        parts = table.parts
        packed = parts.pop("packed")
        rows = packed.index_select(0, flat)
        parts["codes"] = unpack(rows, code_dtype(form), (flat.numel(), form.shape[1]))
    else:
        parts = table.plain_parts()
        parts["codes"] = parts["codes"].index_select(0, flat)
    for name in ("scale", "zero_point", "table"):
        part = parts.get(name)
        if part is not None and part.dim() > 1 and part.shape[0] == form.shape[0]:
            parts[name] = part.index_select(0, flat)
    values = decode(parts, replace(form, shape=(flat.numel(), form.shape[1]), layout="plain"))
    return values.reshape(*places.shape, form.shape[1])
