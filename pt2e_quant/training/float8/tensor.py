"""Matrices in float8 that know which products of a linear they are for."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, final

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from pt2e_quant.core.arguments import check_tensor
from pt2e_quant.core.errors import UnsupportedError, member_named
from pt2e_quant.core.formats.blocks import block_lengths, grid_shape
from pt2e_quant.core.formats.format_arithmetic import block_amax, scale_of_amax
from pt2e_quant.core.granularity import Granularity, PerBlock, PerRow, PerTensor
from pt2e_quant.core.schemes import TensorScheme
from pt2e_quant.tensors.form import TensorForm
from pt2e_quant.tensors.quantized_tensor import QuantizedTensor
from pt2e_quant.tensors.values import encode
from pt2e_quant.training.float8.config import (
    GemmInputRole,
    LinearMMConfig,
    choose_mm_config,
    format_of,
)
from pt2e_quant.training.float8.scaled_mm import Operand, scaled_mm

_aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class Float8Form(TensorForm):
    """A float8 tensor without its numbers.

    Args:
        role: which operand of a linear's products it is.
        mm: how the products run that it is an operand of.
    """

    role: GemmInputRole
    mm: LinearMMConfig


@final
class Float8Tensor(QuantizedTensor):
    """A quantized tensor in float8 that knows which products of a linear it is for.

    Products of two of them run in float8. Operators that know nothing of float8 get real values
    in the original dtype. Its parts are `codes`, float8, and `scale`, float32, real units per
    code, of the grid of blocks.
    """

    codes: Tensor
    scale: Tensor
    form: Float8Form

    @property
    def role(self) -> GemmInputRole:
        """Its role as an operand of a linear's products."""
        return self.form.role

    @property
    def mm_config(self) -> LinearMMConfig:
        """Configuration of the products that it is an operand of."""
        return self.form.mm

    @property
    def original_dtype(self) -> torch.dtype:
        """The dtype seen by code that knows nothing of float8."""
        return self.form.dtype

    @property
    def axis(self) -> int | None:
        """The axis, 0 or -1, that a scale takes in all of; None for one scale or blocks."""
        granularity = self.operand().granularity
        return granularity.dim if isinstance(granularity, PerRow) else None

    def operand(self) -> Operand:
        """The operands of a kernel: codes and scales in the axis order of the visible tensor."""
        granularity, axes = self.form.scheme.granularity, self.form.axes
        if not self.form.is_upright:
            granularity = _transposed(granularity)
        codes, scale = self.codes.permute(axes), self.scale.permute(axes)
        return Operand(codes=codes, scale=scale, granularity=granularity)

    def _stable_hash_for_caching(self) -> str:
        return f"{super()._stable_hash_for_caching()} {self.form.role} {self.form.mm}"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # the base has a method

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares its default as a function
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        run = _OPERATORS.get(func)
        found = NotImplemented if run is None else run(func, args, kwargs or {})
        if found is not NotImplemented:
            return found
        return super().__torch_dispatch__(func, types, args, kwargs)


def _transposed(granularity: Granularity) -> Granularity:
    if isinstance(granularity, PerRow):
        return PerRow(0 if granularity.dim == -1 else -1)
    if isinstance(granularity, PerBlock):
        return PerBlock(granularity.block_size[::-1])
    return granularity


class _ToFloat8(torch.autograd.Function):
    """A float8 tensor; the gradient passes through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cast: "Cast", scale: Tensor | None) -> Tensor:
        ctx.dtype = x.dtype
        return cast_to_float8(x, cast, scale)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].to(ctx.dtype), None, None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """Settings of the cast of a tensor to float8.

    Attributes:
        float8: the dtype of its codes.
        granularity: what shares a scale.
        role: which operand of a linear's products it is.
        mm: how products run.
        dtype: what code sees; that of the tensor if None.
    """

    float8: torch.dtype = torch.float8_e4m3fn
    granularity: Granularity = PerTensor()  # noqa: RUF009  # a frozen value
    role: GemmInputRole = GemmInputRole.INPUT
    mm: LinearMMConfig = LinearMMConfig()  # noqa: RUF009  # a frozen value
    dtype: torch.dtype | None = None

    def form(self, x: Tensor) -> Float8Form:
        """The form of the float8 tensor of x."""
        number = format_of(self.float8)
        scheme = TensorScheme(
            dtype=number.code_dtype, granularity=self.granularity, symmetric=True, format=number
        )
        dtype, shape = self.dtype or x.dtype, tuple(x.shape)
        return Float8Form(scheme=scheme, dtype=dtype, shape=shape, role=self.role, mm=self.mm)


def to_float8(
    x: Tensor,
    float8: torch.dtype = torch.float8_e4m3fn,
    *,
    role: GemmInputRole = GemmInputRole.INPUT,
    granularity: Granularity | None = None,
    mm: LinearMMConfig | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """A tensor in float8; its gradient passes through.

    Values are divided by the scale in float32, rounded to nearest, ties to even, and saturated.
    A DTensor stays one, of local float8 tensors; its scale is that of the whole tensor.

    Args:
        x: a matrix, float; of any dimensions where one scale serves all.
        float8: float8_e4m3fn or float8_e5m2.
        role: which operand of a linear's products it is.
        granularity: what shares a scale; the whole tensor if None.
        mm: how products run; `LinearMMConfig()` if None.
        scale: float32; found from x if None.

    Raises:
        ConfigError: x is no tensor of real numbers, float8 no float8, or there is no such role.
    """
    check_tensor("x", x)
    format_of(float8)
    cast = Cast(
        float8=float8,
        role=member_named(GemmInputRole, role, "role"),
        granularity=granularity or PerTensor(),
        mm=mm or LinearMMConfig(),
    )
    made: Tensor = _ToFloat8.apply(x, cast, scale)  # type: ignore[no-untyped-call]
    return made


def cast_to_float8(x: Tensor, cast: Cast, scale: Tensor | None = None) -> Tensor:
    """The forward pass of `to_float8`."""
    if isinstance(x, DTensor):
        return _cast_shards(x, cast, scale)
    if scale is None:
        scale = scale_of(amax_of(x, cast.granularity), cast.float8)
    if cast.granularity == PerTensor():
        scale = scale.reshape((1,) * x.dim())
    form = cast.form(x)
    return Float8Tensor({"codes": encode(x, {"scale": scale}, form), "scale": scale}, form)


def scale_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The float32 scales at which greatest magnitudes are the greatest float8; finite."""
    finite = amax.to(torch.float32).clamp(max=torch.finfo(torch.float32).max)
    return scale_of_amax(finite, format_of(dtype).max, torch.float32)


def amax_of(x: Tensor, granularity: Granularity) -> Tensor:
    """The greatest magnitudes of blocks, float32; of a DTensor's shard those of the whole."""
    block = block_lengths(granularity, x.dim())
    local = x.to_local() if isinstance(x, DTensor) else x
    # nothing has no greatest magnitude
    is_empty = local.numel() == 0
    amax = (
        local.new_zeros(grid_shape(local.shape, block), dtype=torch.float32)
        if is_empty
        else block_amax(local, block)
    )
    if not isinstance(x, DTensor):
        return amax
    for at, placement in enumerate(x.placements):
        if isinstance(placement, Shard) and _takes_in(granularity, placement.dim, x.dim()):
            amax = collectives.all_reduce(amax, "max", (x.device_mesh, at))
    return amax


def _takes_in(granularity: Granularity, axis: int, dim: int) -> bool:
    """True if a scale takes in elements of different shards along an axis.

    Raises:
        UnsupportedError: the granularity is blocks, which shards may cut through.
    """
    if isinstance(granularity, PerBlock):
        if granularity.block_size[axis] == 1:
            return False
        raise UnsupportedError(
            f"{granularity} of a tensor that is sharded along axis {axis}: shards may cut blocks",
            fix="use tensorwise or rowwise scaling with tensor parallelism",
        )
    if isinstance(granularity, PerRow):
        return granularity.dim % dim == axis % dim
    return True


def _cast_shards(x: DTensor, cast: Cast, scale: Tensor | None) -> Tensor:
    if any(isinstance(p, Partial) for p in x.placements):
        # A part of a sum has no range that says anything about the sum.
        whole = [Replicate() if isinstance(p, Partial) else p for p in x.placements]
        x = x.redistribute(placements=whole)
    if scale is None:
        scale = scale_of(amax_of(x, cast.granularity), cast.float8)
    local = cast_to_float8(x.to_local(), cast, scale)
    return DTensor.from_local(
        local, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
    )


def _multiply(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Mm and addmm of two float8 matrices."""
    bias, (left, right) = (args[0], args[1:3]) if len(args) > 2 else (None, args)
    if not isinstance(left, Float8Tensor) or not isinstance(right, Float8Tensor) or kwargs:
        return NotImplemented
    if isinstance(bias, Float8Tensor):
        return NotImplemented
    config = choose_mm_config((left.form.role, left.form.mm), (right.form.role, right.form.mm))
    y = scaled_mm(left.operand(), right.operand(), left.form.dtype, config)
    if not config.fp8_output:
        return y if bias is None else y + bias
    own = Cast(role=GemmInputRole.INPUT, mm=left.form.mm, dtype=left.form.dtype).form(y)
    product = Float8Tensor({"codes": y, "scale": torch.ones(1, 1, device=y.device)}, own)
    return product if bias is None else product.dequantize() + bias


def _move_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Operators that move values, of a tensor with one scale."""
    x = args[0]
    if not _has_one_scale(x):
        return NotImplemented
    codes = func(x.codes.permute(x.form.axes), *args[1:], **kwargs)
    return torch.utils._pytree.tree_map_only(Tensor, lambda part: _moved(x, part), codes)


def _collect(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Collectives on a tensor with one scale; as bytes, because not every backend has float8."""
    x = args[0]
    if not _has_one_scale(x):
        return NotImplemented
    moved = func(x.codes.permute(x.form.axes).view(torch.uint8), *args[1:], **kwargs)
    return _moved(x, moved.view(x.codes.dtype))


def _join(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Cat of parts of one tensor, which share its scale."""
    parts = args[0]
    if not all(isinstance(part, Float8Tensor) and _has_one_scale(part) for part in parts):
        return NotImplemented
    first = parts[0]
    for part in parts:
        is_same = part.scale.data_ptr() == first.scale.data_ptr()
        if not is_same or replace(part.form, shape=(), axes=()) != replace(
            first.form, shape=(), axes=()
        ):
            return NotImplemented
    codes = [part.codes.permute(part.form.axes).view(torch.uint8) for part in parts]
    return _moved(first, func(codes, *args[1:], **kwargs).view(first.codes.dtype))


def _has_one_scale(x: Float8Tensor) -> bool:
    return x.form.scheme.granularity == PerTensor()


def _moved(x: Float8Tensor, codes: Tensor) -> Float8Tensor:
    """Codes under the one scale of a tensor."""
    form = replace(x.form, shape=tuple(codes.shape), axes=())
    return Float8Tensor({"codes": codes, "scale": x.scale.reshape((1,) * codes.dim())}, form)


_Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
_c10d = torch.ops._c10d_functional
_OPERATORS: MappingProxyType[Any, _Run] = MappingProxyType(
    {
        _aten.mm.default: _multiply,
        _aten.addmm.default: _multiply,
        _aten.view.default: _move_whole,
        _aten._unsafe_view.default: _move_whole,
        _aten.as_strided.default: _move_whole,
        _aten.slice.Tensor: _move_whole,
        _aten.split.Tensor: _move_whole,
        _aten.cat.default: _join,
        _c10d.all_gather_into_tensor.default: _collect,
        _c10d.wait_tensor.default: _collect,
    }
)
"""Operators that keep float8, beside those of all quantized tensors; others get real values."""
