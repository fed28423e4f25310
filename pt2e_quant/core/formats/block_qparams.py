"""Qparams that `core.qparams` cannot hold: scales in blocks, of any form, with or without table.

They are kept as a graph keeps them: rounded to their dtype, or double-quantized. What maps values
to codes is always what is kept, never what it was rounded from.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.formats.blocks import WHOLE, spread
from pt2e_quant.core.formats.float_codes import to_scale_dtype
from pt2e_quant.core.formats.format_arithmetic import dequantize_block, real_scale
from pt2e_quant.core.formats.scale_format import ScaleFormat
from pt2e_quant.core.schemes import TensorScheme


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptScale:
    """Scales as they are kept.

    Attributes:
        values: of `blocks.grid_shape`, in the dtype of their format; uint8 steps if doubled.
        tensor_scale: float32[1] that the values are in units of.
        steps: float32[ceil(N / group)], the scales of N double-quantized scales in their order.
        group: how many scales share a step.
    """

    values: Tensor
    tensor_scale: Tensor | None = None
    steps: Tensor | None = None
    group: int | None = None

    def real(self) -> Tensor:
        """The scales that are in force: float32, shaped like values."""
        if self.steps is None or self.group is None:
            return real_scale(self.values, self.tensor_scale)
        flat = dequantize_block(
            self.values.reshape(-1), self.steps, None, [self.group], 0, 255, torch.uint8
        )
        return flat.reshape(self.values.shape)


def keep_scale(scale: Tensor, form: ScaleFormat, tensor_scale: Tensor | None = None) -> KeptScale:
    """Scales in the form they are kept in.

    Args:
        scale: float32, positive and finite, of `blocks.grid_shape`.
        form: the form.
        tensor_scale: float32[1], of a form in units of the tensor's; found if None.
    """
    if form.in_tensor_units:
        if tensor_scale is None:
            limit = torch.finfo(form.dtype).max
            tensor_scale = (scale.amax() / limit).clamp(min=torch.finfo(torch.float32).tiny)
            tensor_scale = tensor_scale.reshape(1)
        scale = scale / tensor_scale
    if form.precision is not None:
        scale = scale.to(form.precision).to(torch.float32)
    if form.is_power_of_two:
        scale = _raise_to_power(scale)
    if form.double_group is None:
        return KeptScale(values=to_scale_dtype(scale, form.dtype), tensor_scale=tensor_scale)
    flat = scale.reshape(-1)
    count = math.ceil(flat.numel() / form.double_group)
    padded = torch.nn.functional.pad(flat, (0, count * form.double_group - flat.numel()))
    steps = padded.reshape(count, -1).amax(1) / 255
    # A scale is never 0: the least is one step.
    codes = (flat / spread(steps, flat.shape, [form.double_group])).round().clamp(1, 255)
    return KeptScale(
        values=codes.to(torch.uint8).reshape(scale.shape), steps=steps, group=form.double_group
    )


def _raise_to_power(scale: Tensor) -> Tensor:
    """The least power of two not below each scale."""
    mantissa, exponent = torch.frexp(scale)
    return torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).to(exponent.dtype))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockQParams:
    """All that maps real values to codes and back, in blocks.

    Attributes:
        scheme: what was asked for.
        block: lengths of a block, see `core.blocks`.
        scale: None where a table holds real values itself.
        zero_point: int32 of `blocks.grid_shape`, of affine integers.
        table: float[K], or float[*grid, K], of a code book.

    Raises:
        ConfigError: a scale or a table is missing, or one is there that means nothing.
    """

    scheme: TensorScheme
    block: tuple[int, ...]
    scale: KeptScale | None
    zero_point: Tensor | None = None
    table: Tensor | None = None

    def __post_init__(self) -> None:
        if self.scale is None and self.table is None:
            raise ConfigError("qparams in blocks need scales, or a table of real values")
        if self.zero_point is not None and self.scheme.format is not None:
            raise ConfigError(f"{self.scheme.format} has no zero_point")

    @property
    def is_per_tensor(self) -> bool:
        """True if one block takes in the whole tensor."""
        return all(length == WHOLE for length in self.block)
