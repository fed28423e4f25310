"""The definition of softmax_quantize: float32 steps behind a sum that is rounded once.

Exponentials and sums have other last bits in a kernel: a result beside a tie may differ by a step.
"""

import torch
from torch import Tensor

from pt2e_quant.core.errors import InputError
from pt2e_quant.kernels.epilogue.epilogue import Epilogue
from pt2e_quant.kernels.epilogue.reference import requantize_real

LONGEST = 16384
"""Scores of a row: a program holds whole rows in registers."""


def check_scores(x: Tensor, mask: Tensor | None) -> None:
    """Refuse shapes that the operator has not.

    Raises:
        InputError: rows that are empty or too long, too many axes, or a mask that does not
            broadcast to the scores.
    """
    if not 1 <= x.dim() <= 4 or not 1 <= x.shape[-1] <= LONGEST:
        raise InputError(
            f"softmax_quantize takes 1 to 4 axes and rows of 1 to {LONGEST} scores, found "
            f"{tuple(x.shape)}"
        )
    if mask is None:
        return
    pairs = zip(reversed(mask.shape), reversed(x.shape), strict=False)
    if mask.dim() > x.dim() or any(mine not in (1, its) for mine, its in pairs):
        raise InputError(
            f"softmax_quantize takes a mask that broadcasts to the scores' {tuple(x.shape)}, "
            f"found {tuple(mask.shape)}"
        )


def softmax_quantize(
    x: Tensor,
    mask: Tensor | None = None,
    scale: float = 1.0,
    value_dtype: torch.dtype = torch.float32,
    *,
    out_dtype: torch.dtype = torch.int8,
    out_scale: float = 1.0 / 256,
    out_zero_point: int = -128,
    out_min: int = -128,
    out_max: int = 127,
    label: str = "",
) -> Tensor:
    """Softmax of the last axis, quantized; see `op.SoftmaxQuantize` for the arguments."""
    check_scores(x, mask)
    end = Epilogue(
        out_dtype=out_dtype,
        out_scale=out_scale,
        out_zero_point=out_zero_point,
        out_min=out_min,
        out_max=out_max,
    )
    scores = x.float() * scale
    if mask is not None:
        scores = scores + mask.float()
    powers = torch.exp(scores - scores.amax(-1, keepdim=True))
    made = powers / powers.double().sum(-1, keepdim=True).float()
    return requantize_real(made.to(value_dtype).float(), end).contiguous()
