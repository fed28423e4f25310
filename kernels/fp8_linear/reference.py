"""The definition of fp8_linear: exact products, summed in float64 and rounded once."""

from typing import Any

import torch
from torch import Tensor

from pt2e_quant.kernels.epilogue.epilogue import Epilogue
from pt2e_quant.kernels.epilogue.reference import finish

RUN = 128
"""Products that a kernel adds before it rounds to float32: one step along K."""


def fp8_linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    *,
    label: str = "",
    **epilogue: Any,
) -> Tensor:
    """The rows of x times the rows of weight; see `op.Fp8Linear` for the arguments.

    Products are exact, their sum is float64, rounded to float32, multiplied by weight_scale and
    then by x_scale, each step rounded to float32, and goes through the epilogue.
    """
    K = x.shape[-1]
    rows = x.to(torch.float64).reshape(x.numel() // max(1, K), K)
    total = (rows @ weight.to(torch.float64).t()).to(torch.float32)
    real = total * weight_scale.reshape(1, -1) * x_scale.reshape(-1, 1)
    return finish(real.reshape((*x.shape[:-1], weight.shape[0])), Epilogue(**epilogue))


def error_bound(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    *,
    splits: int,
    run_error: float,
) -> Tensor:
    """Return the bound of a kernel's error before the epilogue: float64[M, N].

    Args:
        x: as in `fp8_linear`; so are the other tensors.
        x_scale: see x.
        weight: see x.
        weight_scale: see x.
        splits: parts of K.
        run_error: of the sum of 128 products, relative to the sum of their magnitudes: 128 * 2^-24
            in float32; 4 * 2^-13 on Hopper, whose fp8 products are added in four steps of about 14
            bits each (DeepSeek-V3, section 3.3.2).
    """
    K = x.shape[-1]
    rows = x.to(torch.float64).abs().reshape(-1, K)
    magnitude = rows @ weight.to(torch.float64).abs().t()
    magnitude = magnitude * weight_scale.reshape(1, -1) * x_scale.reshape(-1, 1)
    return magnitude * (run_error + (-(-K // RUN) + splits + 4) * 2.0**-24)
