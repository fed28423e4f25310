"""Linears that train in float8: their three products, scales of earlier steps, conversion."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from pt2e_quant.core.arguments import check_module
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.tensors.plan import Filter
from pt2e_quant.training.float8.config import Float8Scaling, Float8TrainingConfig, GemmInputRole
from pt2e_quant.training.float8.scaled_mm import has_scaled_mm
from pt2e_quant.training.float8.tensor import (
    Cast,
    Float8Tensor,
    amax_of,
    cast_to_float8,
    scale_of,
)
from pt2e_quant.training.linear_products import LinearProducts, LowPrecision
from pt2e_quant.training.linear_products import convert_linears as _convert_linears

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


_ROLES = tuple(GemmInputRole)
_AMAXES, _SCALES, _HISTORY = "float8_amaxes", "float8_scales", "float8_history"


@dataclass(frozen=True)
class Float8Products(LinearProducts):
    """The products of a linear in float8."""

    config: Float8TrainingConfig

    def buffers(self, device: torch.device) -> dict[str, Tensor]:
        """Return delayed scaling's state by role: amax since the last update, scale, history."""
        if self.config.amax_history is None:
            return {}
        return {
            _AMAXES: torch.zeros(len(_ROLES), device=device),
            _SCALES: torch.zeros(len(_ROLES), device=device),
            _HISTORY: torch.zeros(len(_ROLES), self.config.amax_history, device=device),
        }

    def prepare_weight(self, weight: Tensor) -> Tensor:
        """A parameter that FSDP2 gathers as float8, if it is to."""
        if not self.config.float8_all_gather:
            return weight
        return GatheredInFloat8(weight.detach(), self._how(GemmInputRole.WEIGHT, -1))

    def output(self, x: Tensor, weight: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """See `LinearProducts`; with one scale for a tensor, x is kept in float8."""
        x8 = self._cast(x, GemmInputRole.INPUT, -1, x.dtype, state)
        w8 = self._cast(weight, GemmInputRole.WEIGHT, -1, x.dtype, state)
        y = torch.mm(x8, w8.t())
        return y, x8 if self._is_whole else x

    def gradients(
        self,
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        state: tuple[Tensor, ...],
        needed: tuple[bool, bool],
    ) -> tuple[Tensor | None, Tensor | None]:
        """See `LinearProducts`."""
        role, dtype = GemmInputRole.GRAD_OUTPUT, grad.dtype
        g8 = self._cast(grad, role, -1, dtype, state)
        dx = dw = None
        if needed[0]:
            dx = torch.mm(g8, self._cast(weight, GemmInputRole.WEIGHT, 0, dtype, state))
        if needed[1]:
            if not self._is_whole:
                g8 = self._cast(grad, role, 0, dtype, state)
            dw = torch.mm(g8.t(), self._cast(x, GemmInputRole.INPUT, 0, dtype, state))
        return dx, dw

    @property
    def _is_whole(self) -> bool:
        return self.config.scaling is Float8Scaling.TENSORWISE

    def _how(self, role: GemmInputRole, inner_axis: int, dtype: torch.dtype | None = None) -> Cast:
        return Cast(
            float8=self.config.dtype_of(role),
            granularity=self.config.granularity_of(role, inner_axis=inner_axis),
            role=role,
            mm=self.config.mm,
            dtype=dtype,
        )

    def _cast(
        self,
        x: Tensor,
        role: GemmInputRole,
        inner_axis: int,
        dtype: torch.dtype,
        state: tuple[Tensor, ...],
    ) -> Tensor:
        if is_float8(x):
            return x
        if isinstance(x, GatheredInFloat8):
            x = x.real_values
        how = self._how(role, inner_axis, dtype)
        if not state:
            return cast_to_float8(x, how)
        amaxes, scales = _local(state[0]), _local(state[1])
        at = _ROLES.index(role)
        amax = amax_of(x, how.granularity).reshape(())
        # The greatest of all calls since the update: to compute a call again changes nothing.
        amaxes[at].copy_(torch.maximum(amaxes[at], amax))
        scale = torch.where(scales[at] > 0, scales[at], scale_of(amax, how.float8))
        return cast_to_float8(x, how, scale)


def is_float8(x: Tensor) -> bool:
    """True if a tensor is float8, or a DTensor of float8 shards."""
    return isinstance(_local(x), Float8Tensor)


def _local(x: Tensor) -> Tensor:
    """The shard of a DTensor, which tensor parallelism makes of buffers too; the tensor itself."""
    return x._local_tensor if isinstance(x, DTensor) else x


def convert_to_float8_training(
    module: nn.Module,
    config: Float8TrainingConfig | None = None,
    filter: Filter | None = None,
) -> nn.Module:
    """Let the linears of a model train in float8, in place.

    Products are emulated where `torch._scaled_mm` does not run. Parameters stay what they are;
    those gathered as float8 are wrapped, so make the optimizer afterwards.

    Args:
        module: as `linear_products.convert_linears` takes it; what it returns and raises too.
        config: how; `Float8TrainingConfig()` if None.
        filter: likewise.

    Raises:
        ConfigError: also where `config` is something else.
    """
    chosen = Float8TrainingConfig() if config is None else config
    if not isinstance(chosen, Float8TrainingConfig):
        raise ConfigError(
            f"config is a Float8TrainingConfig, found {chosen!r}",
            fix='Float8TrainingConfig(scaling="rowwise")',
        )

    def products(linear: nn.Module, name: str) -> Float8Products:
        is_rowwise = chosen.scaling is Float8Scaling.ROWWISE
        kind = linear.get_parameter("weight").device.type
        has_kernel = kind == "meta" or has_scaled_mm(kind, is_rowwise=is_rowwise)
        return Float8Products(chosen if has_kernel else chosen.emulated())

    return _convert_linears(module, products, filter)


def update_float8_scales(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Set the scales of delayed scaling from what was seen; call it once after each step.

    The greatest magnitudes since the last call enter the histories, and the greatest of a history
    makes the scale. Until the first call, scales are found from each tensor itself.

    Args:
        module: the model.
        group: the ranks that agree on the greatest magnitudes, in one collective; all ranks if
            None and torch.distributed is initialized.

    Raises:
        ConfigError: no linear of the model has delayed scaling.
    """
    check_module("module", module)
    linears = list(_delayed(module))
    if not linears:
        raise ConfigError(
            "no linear has delayed scaling", fix="Float8TrainingConfig(amax_history=16)"
        )
    with torch.no_grad():
        seen = torch.stack([_local(linear.get_buffer(_AMAXES)) for linear, _ in linears])
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(seen, dist.ReduceOp.MAX, group)
        for (linear, config), amaxes in zip(linears, seen, strict=True):
            history = _local(linear.get_buffer(_HISTORY))
            history.copy_(torch.cat([amaxes.unsqueeze(1), history[:, :-1]], dim=1))
            greatest = history.amax(1)
            scales = [scale_of(greatest[i], config.dtype_of(r)) for i, r in enumerate(_ROLES)]
            # what was never seen has no scale yet
            _local(linear.get_buffer(_SCALES)).copy_(torch.stack(scales) * (greatest > 0))
            _local(linear.get_buffer(_AMAXES)).zero_()


def _delayed(module: nn.Module) -> Iterable[tuple[LowPrecision, Float8TrainingConfig]]:
    for part in module.modules():
        products = getattr(part, "products", None)
        if isinstance(part, LowPrecision) and isinstance(products, Float8Products):
            if products.config.amax_history is not None:
                yield part, products.config
