"""The affine arithmetic in float: choose a scale and zero_point, quantize, dequantize.

quantize and dequantize give, bit for bit, what the ``quantized_decomposed`` ops give, and
choose_qparams what the observers of torch.ao (UniformQuantizationObserverBase) give. One case
differs on purpose: a quotient beyond int32 saturates here, where the ops wrap around.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pt2e_quant.core.dtypes import limits_of
from pt2e_quant.core.errors import ConfigError

DEFAULT_EPS = float(torch.finfo(torch.float32).eps)
"""The least scale, as torch.ao has it: below it 1 / scale loses its meaning in float32."""

_MAX_SCALE = float(torch.finfo(torch.float32).max)

_BLOCK = 1 << 18
"""Elements of a tensor that are worked on at a time where several passes go over them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QParams:
    """All that maps real values to integers and back: q = round(x / scale) + zero_point.

    Attributes:
        scale: real units per integer step; float32[1], float32[C] along an axis, or
            float32[rows, groups] for the groups of a matrix's rows.
        zero_point: the integer that stands for 0.0; int32, shaped like scale. Per channel it may be
            float32 (torch.per_channel_affine_float_qparams): -min / scale, not rounded.
        quant_min: least integer used.
        quant_max: greatest integer used.
        dtype: integer dtype of the quantized tensor.
        axis: the axis that scale runs along; None if per tensor or per group.
        group_size: how many neighbours in a row share a scale; None if not per group.
    """

    scale: Tensor
    zero_point: Tensor
    quant_min: int
    quant_max: int
    dtype: torch.dtype
    axis: int | None = None
    group_size: int | None = None

    def __post_init__(self) -> None:
        allowed = (torch.int32,) if self.axis is None else (torch.int32, torch.float32)
        if self.scale.dtype != torch.float32 or self.zero_point.dtype not in allowed:
            raise ConfigError(
                "qparams need a float32 scale and an int32 zero_point, found "
                f"{self.scale.dtype} and {self.zero_point.dtype}"
            )
        if self.scale.shape != self.zero_point.shape:
            raise ConfigError(
                "scale and zero_point differ in shape: "
                f"{tuple(self.scale.shape)} and {tuple(self.zero_point.shape)}"
            )
        if self.group_size is not None:
            if self.axis is not None or self.scale.dim() != 2:
                raise ConfigError(
                    "per-group qparams need no axis and a scale of rows and groups, found axis "
                    f"{self.axis} and shape {tuple(self.scale.shape)}"
                )
        elif self.axis is None and self.scale.numel() != 1:
            raise ConfigError(f"per-tensor qparams need one scale, found {self.scale.numel()}")
        if self.axis is not None and self.scale.dim() != 1:
            raise ConfigError(
                "per-channel qparams need a scale of one axis, found shape "
                f"{tuple(self.scale.shape)}"
            )
        limits = limits_of(self.dtype)
        if not limits.holds(self.quant_min, self.quant_max):
            raise ConfigError(
                f"quant_min {self.quant_min} .. quant_max {self.quant_max} is no range within "
                f"{self.dtype} ({limits.quant_min} .. {limits.quant_max})"
            )

    @classmethod
    def per_tensor(
        cls, scale: float, zero_point: int, quant_min: int, quant_max: int, dtype: torch.dtype
    ) -> "QParams":
        """Qparams of one scale from Python numbers; the scale is rounded to float32."""
        return cls(
            scale=torch.tensor([scale], dtype=torch.float32),
            zero_point=torch.tensor([zero_point], dtype=torch.int32),
            quant_min=quant_min,
            quant_max=quant_max,
            dtype=dtype,
        )

    @property
    def is_per_tensor(self) -> bool:
        """True if there is one scale."""
        return self.axis is None and self.group_size is None

    @property
    def is_per_channel(self) -> bool:
        """True if the scale runs along an axis."""
        return self.axis is not None

    @property
    def scale_float(self) -> float:
        """The one scale of per-tensor qparams."""
        return float(self.scale.item())

    @property
    def zero_point_int(self) -> int:
        """The one zero_point of per-tensor qparams."""
        return int(self.zero_point.item())


def symmetric_zero_point(
    dtype: torch.dtype, quant_min: int, quant_max: int, *, has_own_range: bool
) -> int:
    """The zero_point torch.ao gives a symmetric tensor: 0 if signed, else the middle.

    With a range of the user's own the middle is rounded down (0 .. 255: 127), without one it is
    rounded up (128); so it is upstream (torch/ao/quantization/observer.py, _calculate_qparams).
    """
    limits = limits_of(dtype)
    if limits.signed:
        return 0
    if has_own_range and limits.bits <= 8:
        return (quant_min + quant_max) // 2
    return 1 << (limits.bits - 1)


def choose_qparams(
    min_val: Tensor,
    max_val: Tensor,
    *,
    quant_min: int,
    quant_max: int,
    symmetric: bool,
    eps: float | Tensor = DEFAULT_EPS,
    zero_point_if_symmetric: int = 0,
) -> tuple[Tensor, Tensor]:
    """Scale and zero_point that cover [min_val, max_val] and 0.0.

    0.0 is always mapped to zero_point exactly, so padding and sparsity survive.

    Args:
        min_val: float, one element or [C].
        max_val: shaped like min_val, nowhere below it, finite.
        quant_min: least integer used.
        quant_max: greatest integer used.
        symmetric: cover [-m, m] with m = max(-min_val, max_val).
        eps: the least scale.
        zero_point_if_symmetric: what a symmetric tensor gets, see symmetric_zero_point.

    Returns:
        scale float32 and zero_point int32, both [1] or [C].
    """
    is_one_number = min_val.numel() == 1 and min_val.device.type == "cpu"
    if not symmetric and is_one_number and not torch.compiler.is_compiling():
        return _choose_one(min_val.item(), max_val.item(), quant_min, quant_max, float(eps))
    low = min_val.to(torch.float32).clamp(max=0.0)
    high = max_val.to(torch.float32).clamp(min=0.0)
    least = torch.as_tensor(eps, dtype=torch.float32, device=low.device)
    if symmetric:
        high = torch.maximum(-low, high)
        scale = torch.maximum(high / (float(quant_max - quant_min) / 2), least)
        zero_point = torch.full(scale.shape, zero_point_if_symmetric, device=low.device)
    else:
        # A range wider than float32's greatest number would give an infinite scale.
        width = (high - low).clamp(max=_MAX_SCALE)
        scale = torch.maximum(width / float(quant_max - quant_min), least)
        steps = torch.round(low / scale).to(torch.int64)
        zero_point = (quant_min - steps).clamp(quant_min, quant_max)
    return scale.reshape(-1), zero_point.to(torch.int32).reshape(-1)


def _choose_one(
    low: float, high: float, quant_min: int, quant_max: int, eps: float
) -> tuple[Tensor, Tensor]:
    """An affine tensor's one scale: the same float32 arithmetic on numbers, a tenth of the time."""
    least, most = np.float32(min(low, 0.0)), np.float32(max(high, 0.0))
    with np.errstate(over="ignore"):
        width = min(most - least, np.float32(_MAX_SCALE))
    scale = max(width / np.float32(quant_max - quant_min), np.float32(eps))
    zero_point = quant_min - int(np.rint(least / scale))
    clamped = min(max(zero_point, quant_min), quant_max)
    return torch.tensor([scale]), torch.tensor([clamped], dtype=torch.int32)


def choose_float_qparams(
    min_val: Tensor, max_val: Tensor, *, quant_min: int, quant_max: int, eps: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Scale and float zero_point of torch.per_channel_affine_float_qparams (embedding tables).

    Here the zero_point is the real -min / scale, not rounded, and 0.0 need not be representable.
    """
    scale = (max_val - min_val) / float(quant_max - quant_min)
    scale = torch.where(scale > torch.as_tensor(eps, device=scale.device), scale, 1.0)
    return scale.reshape(-1), (-1 * min_val / scale).reshape(-1)


def _along(values: Tensor, axis: int, dim: int) -> Tensor:
    if not -dim <= axis < dim:
        raise ConfigError(f"axis {axis} is out of range for a tensor of {dim} dimensions")
    shape = [1] * dim
    shape[axis] = values.numel()
    return values.view(shape)


def _groups(x: Tensor, qp: QParams) -> Tensor:
    """A matrix [rows, columns] as [rows, groups, group_size]."""
    rows, groups = qp.scale.shape
    if x.dim() != 2 or x.shape[0] != rows or x.shape[1] != groups * (qp.group_size or 0):
        raise ConfigError(
            f"a tensor of shape {tuple(x.shape)} has no {rows} rows of {groups} groups of "
            f"{qp.group_size}"
        )
    return x.reshape(rows, groups, -1)


def _to_integer(x: Tensor, qp: QParams) -> Tensor:
    """round(x / scale) + zero_point, clamped, still in float32."""
    # As in the ops: the product with 1 / scale, not the quotient, which can differ by one step.
    zero_point: int | Tensor
    if qp.group_size is not None:
        # As in the op: the zero_point is added before rounding.
        scaled = _groups(x, qp) * (1.0 / qp.scale.unsqueeze(-1))
        scaled = scaled.add_(qp.zero_point.unsqueeze(-1)).round_()
        return scaled.clamp_(qp.quant_min, qp.quant_max).reshape(x.shape)
    if qp.axis is None:
        scaled, zero_point = x * (1.0 / qp.scale_float), qp.zero_point_int
    else:
        # The same bits as 1 / scale, which goes through Python.
        scaled = x * _along(qp.scale, qp.axis, x.dim()).reciprocal()
        zero_point = _along(qp.zero_point, qp.axis, x.dim())
    return scaled.round_().add_(zero_point).clamp_(qp.quant_min, qp.quant_max)


def quantize(x: Tensor, qp: QParams) -> Tensor:
    """Integers of a float tensor, in the storage dtype of ``qp.dtype``; ties go to even."""
    storage = limits_of(qp.dtype).storage
    if x.numel() > _BLOCK and x.dim() > 1 and storage != torch.int32:
        return _quantize_in_blocks(x, qp, storage)
    clamped = _to_integer(x.to(torch.float32), qp)
    if storage == torch.int32:
        # 2**31 - 1 is no float32: clamp let 2**31 through, which int32 would wrap.
        return clamped.to(torch.int64).clamp(qp.quant_min, qp.quant_max).to(torch.int32)
    return clamped.to(storage)


def _quantize_in_blocks(x: Tensor, qp: QParams, storage: torch.dtype) -> Tensor:
    """Quantize a block of rows at a time: six times as fast, as the block stays in the cache.

    No float copy of the whole tensor is made either.
    """
    shape = x.shape
    rows = max(1, _BLOCK * shape[0] // x.numel())
    inverse, zero_point = 1.0 / qp.scale, qp.zero_point
    if qp.group_size is not None:
        x = _groups(x, qp)
        inverse, zero_point = inverse.unsqueeze(-1), zero_point.unsqueeze(-1)
    elif qp.axis is not None:
        inverse = _along(inverse, qp.axis, x.dim())
        zero_point = _along(zero_point, qp.axis, x.dim())
    runs_along_rows = inverse.dim() > 0 and inverse.shape[0] > 1
    has_zeros = bool(zero_point.any())
    result = torch.empty(x.shape, dtype=storage, device=x.device)
    held = torch.empty((rows, *x.shape[1:]), dtype=torch.float32, device=x.device)
    for start in range(0, x.shape[0], rows):
        part = slice(start, start + rows)
        block = x[part]
        integers = held[: block.shape[0]]
        scale, zero = (v[part] if runs_along_rows else v for v in (inverse, zero_point))
        torch.mul(block, scale, out=integers)
        if has_zeros and qp.group_size is not None:  # as in the op: added before rounding
            integers.add_(zero)
        integers.round_()
        if has_zeros and qp.group_size is None:
            integers.add_(zero)
        result[part] = integers.clamp_(qp.quant_min, qp.quant_max)
    return result.reshape(shape)


def dequantize(q: Tensor, qp: QParams, dtype: torch.dtype = torch.float32) -> Tensor:
    """Real values of integers: (q - zero_point) * scale.

    Per tensor it is computed in dtype, as the op does: ask for float32 unless q has 8 bits.
    """
    if qp.group_size is not None:
        steps = _groups(q, qp).to(torch.float32) - qp.zero_point.unsqueeze(-1)
        return (steps * qp.scale.unsqueeze(-1)).reshape(q.shape).to(dtype)
    if qp.axis is None:
        return (q.to(dtype) - qp.zero_point_int) * qp.scale_float
    scale = _along(qp.scale, qp.axis, q.dim())
    zero_point = _along(qp.zero_point, qp.axis, q.dim())
    if q.dtype == torch.int32:
        return ((q - zero_point) * scale).to(dtype)
    # Exact in float32 up to 16 bits, and twice as fast as integers of two widths.
    return (q.to(torch.float32) - zero_point.to(torch.float32)).mul_(scale).to(dtype)


def fake_quantize(x: Tensor, qp: QParams) -> Tensor:
    """Quantize and dequantize in one go; the result has the dtype of x."""
    return dequantize(quantize(x, qp), qp).to(x.dtype)
