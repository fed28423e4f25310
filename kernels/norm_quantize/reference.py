"""The definition of the fused norms: float32 steps behind sums that are rounded once.

A kernel adds in another order, so its sums may differ in their last bits and a result by one
step where it lies beside a tie.
"""

import torch
from torch import Tensor

from pt2e_quant.kernels.epilogue.epilogue import Epilogue
from pt2e_quant.kernels.epilogue.reference import requantize_real
from pt2e_quant.kernels.norm_quantize.norm import Norm, NormKind
from pt2e_quant.kernels.quantize_per_token import reference as per_token


def _mean(x: Tensor) -> Tensor:
    return x.double().mean(-1, keepdim=True).float()


def normalize(x: Tensor, norm: Norm) -> Tensor:
    """The rows of x normalized, in value_dtype."""
    real = x.float()
    if norm.kind == NormKind.LAYER:
        real = real - _mean(real)
    made = real * (1.0 / torch.sqrt(_mean(real * real) + norm.eps))
    if norm.rounds_first:
        made = made.to(norm.value_dtype).float()
    if norm.weight is not None:
        made = made * norm.weight.float()
    if norm.bias is not None:
        made = made + norm.bias.float()
    return made.to(norm.value_dtype)


def norm_quantize(
    x: Tensor,
    kind: str,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    rounds_first: bool = False,
    value_dtype: torch.dtype = torch.float32,
    *,
    out_dtype: torch.dtype = torch.int8,
    out_scale: float = 1.0,
    out_zero_point: int = 0,
    out_min: int = -128,
    out_max: int = 127,
    label: str = "",
) -> Tensor:
    """Normalize and quantize to given qparams; see `op.NormQuantize` for the arguments."""
    norm = Norm(kind, weight, bias, eps, rounds_first, value_dtype)
    end = Epilogue(
        out_dtype=out_dtype,
        out_scale=out_scale,
        out_zero_point=out_zero_point,
        out_min=out_min,
        out_max=out_max,
    )
    return requantize_real(normalize(x, norm).float(), end).contiguous()


def norm_quantize_per_token(
    x: Tensor,
    kind: str,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    rounds_first: bool = False,
    value_dtype: torch.dtype = torch.float32,
    *,
    quant_min: int = -128,
    quant_max: int = 127,
    label: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalize, then `quantize_per_token`; see `op.NormQuantizePerToken` for the arguments."""
    norm = Norm(kind, weight, bias, eps, rounds_first, value_dtype)
    made = per_token.quantize_per_token(normalize(x, norm).contiguous(), quant_min, quant_max)
    return made


def norm_quantize_per_token_e4m3(
    x: Tensor,
    kind: str,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    rounds_first: bool = False,
    value_dtype: torch.dtype = torch.float32,
    *,
    label: str = "",
) -> tuple[Tensor, Tensor]:
    """Normalize, then `quantize_per_token_e4m3`; see `op.NormQuantizePerTokenE4m3`."""
    norm = Norm(kind, weight, bias, eps, rounds_first, value_dtype)
    return per_token.quantize_per_token_e4m3(normalize(x, norm).contiguous())
