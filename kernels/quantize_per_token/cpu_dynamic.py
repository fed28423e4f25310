"""quantize_per_token on CPUs: the definition's steps in the memory that they already have."""

import torch
from torch import Tensor

from pt2e_quant.kernels.quantize_per_token.reference import LEAST_SCALE

__all__ = ["quantize_per_token"]


def quantize_per_token(
    x: Tensor, quant_min: int = -128, quant_max: int = 127, *, label: str = ""
) -> tuple[Tensor, Tensor, Tensor]:
    """Integers, scales and zero points of the rows of x; see `op.QuantizeRows`.

    Each step rounds as the definition's does: only where results are written differs.
    """
    scale, zero_point = _row_qparams(x)
    # In float64, as the definition; a copy, since x is of a narrower dtype.
    steps = x.double().mul_(scale.double().reciprocal_())
    steps.add_(zero_point).round_().clamp_(quant_min, quant_max)
    return steps.to(torch.int8), scale.float(), zero_point.to(torch.int32)


def _row_qparams(x: Tensor) -> tuple[Tensor, Tensor]:
    """`reference.row_qparams`, step for step."""
    low = torch.amin(x, dim=-1, keepdim=True).clamp_max_(0)
    high = torch.amax(x, dim=-1, keepdim=True).clamp_min_(0)
    scale = (high - low).div_(255.0).clamp_min_(LEAST_SCALE)
    low.div_(scale)
    high.div_(scale)
    is_from_low = (low - 128).add_(high + 127) > 0
    zero_point = torch.where(is_from_low, -128 - low, 127 - high)
    return scale, zero_point.clamp_(-128, 127).round_()
