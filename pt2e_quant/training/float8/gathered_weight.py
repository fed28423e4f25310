"""A weight whose shards FSDP2 gathers as float8: a quarter of the bytes of float32."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from pt2e_quant.training.float8.tensor import (
    Cast,
    Float8Tensor,
    amax_of,
    cast_to_float8,
    scale_of,
)

_aten = torch.ops.aten


class GatheredInFloat8(torch.Tensor):
    """A weight, or a shard of it, in its own precision.

    Args:
        real_values: the weight.
        cast: how it becomes float8.
    """

    real_values: Tensor
    cast: Cast

    @staticmethod
    def __new__(cls, real_values: Tensor, cast: Cast) -> "GatheredInFloat8":
        """Wrap a weight, which is shared."""
        made: GatheredInFloat8 = torch.Tensor._make_wrapper_subclass(
            cls,
            real_values.size(),
            strides=real_values.stride(),
            storage_offset=real_values.storage_offset(),
            dtype=real_values.dtype,
            device=real_values.device,
        )
        made.real_values, made.cast = real_values, cast
        return made

    def __init__(self, real_values: Tensor, cast: Cast) -> None:
        pass

    def __tensor_flatten__(self) -> tuple[list[str], Cast]:
        return ["real_values"], self.cast

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], cast: Cast, outer_size: Any, outer_stride: Any
    ) -> "GatheredInFloat8":
        return GatheredInFloat8(inner["real_values"], cast)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GatheredInFloat8({self.real_values}, gathered as {self.cast.float8})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Files hold the weight itself, so that any program can read them.
        real = self.real_values
        if isinstance(self, nn.Parameter):
            real = nn.Parameter(real, requires_grad=self.requires_grad)
        return real.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares its default as a function
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        tree = torch.utils._pytree
        first = args[0] if args else None
        inner, named = tree.tree_map_only(
            GatheredInFloat8, lambda x: x.real_values, (args, kwargs or {})
        )
        found = func(*inner, **named)
        if func is _aten.copy_.default:
            return first
        if func not in _KEEP or not isinstance(first, GatheredInFloat8):
            return found
        return tree.tree_map_only(Tensor, lambda x: GatheredInFloat8(x, first.cast), found)

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: Any,
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """The shard in float8, as bytes, at the scale of the whole weight."""
        amax = amax_of(self.real_values, self.cast.granularity)
        dist.all_reduce(amax, dist.ReduceOp.MAX, mesh.get_group())
        scale = scale_of(amax, self.cast.float8)
        shard = cast_to_float8(self.real_values, self.cast, scale)
        assert isinstance(shard, Float8Tensor)
        # shards are equal in size but for the last ones
        padded = -(-outer_size[0] // mesh.size())
        missing = [0, 0] * (self.dim() - 1) + [0, padded - self.shape[0]]
        return (torch.nn.functional.pad(shard.codes.view(torch.uint8), missing),), scale

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Tensor,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The whole weight in float8, over the memory that was gathered into."""
        (gathered,) = all_gather_outputs
        if out is not None:
            local = out._local_tensor if isinstance(out, DTensor) else out
            assert isinstance(local, Float8Tensor)
            local.scale.copy_(metadata)
            return None
        cast = replace(self.cast, dtype=param_dtype)
        codes = gathered.view(cast.float8)
        form = cast.form(codes)
        return Float8Tensor({"codes": codes, "scale": metadata}, form), (gathered,)


_KEEP = frozenset(
    {
        _aten.empty_like.default,
        _aten.new_zeros.default,
        _aten.new_empty.default,
        _aten.slice.Tensor,
        _aten.split.Tensor,
        _aten.view.default,
        _aten.as_strided.default,
        _aten.detach.default,
        _aten.clone.default,
        _aten._to_copy.default,
        _aten._pin_memory.default,
    }
)
"""Operators that keep the tensor class; all others take and give plain values."""
