"""quantize_per_token on CPUs: the definition's steps, computed in place."""

import math
from ctypes import c_float

import torch
from torch import Tensor

from pt2e_quant.kernels.quantize_per_token.reference import LEAST_SCALE


def quantize_per_token(
    x: Tensor, quant_min: int = -128, quant_max: int = 127, *, label: str = ""
) -> tuple[Tensor, Tensor, Tensor]:
    """Integers, scales and zero points of the rows of x; see `op.QuantizeRows`.

    Each step rounds as the definition's does: only where results are written differs. One row's
    scale is computed in Python: a dozen of torch's calls take longer than all the rest of it.
    """
    if x.dtype is torch.float32 and x.numel() == x.shape[-1]:
        qparams = qparams_of_one(x)
        if qparams is not None:
            steps = x.double().mul_(1.0 / qparams[0]).add_(qparams[1])
            integers = steps.round_().clamp_(quant_min, quant_max).to(torch.int8)
            scale, zero_point = (torch.full((*x.shape[:-1], 1), value) for value in qparams)
            return integers, scale, zero_point.to(torch.int32)
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


def qparams_of_one(x: Tensor) -> tuple[float, int] | None:
    """`reference.row_qparams` of one row of float32; None where they are not finite.

    A sum, difference or quotient of float32 numbers that is rounded to float64 and then to float32
    is the one rounded once: 53 bits are more than twice 24 and two.
    """
    least, greatest = torch.aminmax(x)
    low, high = min(least.item(), 0.0), max(greatest.item(), 0.0)
    scale = max(_float32(_float32(high - low) / 255.0), LEAST_SCALE)
    if not math.isfinite(scale):
        return None
    low, high = _float32(low / scale), _float32(high / scale)
    is_from_low = _float32(_float32(low - 128) + _float32(high + 127)) > 0
    zero_point = _float32(-128 - low if is_from_low else 127 - high)
    return scale, round(min(max(zero_point, -128.0), 127.0))


def _float32(value: float) -> float:
    return c_float(value).value
