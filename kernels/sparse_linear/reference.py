"""The definition of sparse_linear: exact dequantized weights, sums in float64 rounded once."""

import torch
from torch import Tensor

from pt2e_quant.kernels.sparse_linear.pack import unpack_sparse

INT4: torch.dtype = getattr(torch, "int4")  # noqa: B009  # torch's stubs do not list it


def dequantize_weight(values: Tensor, pairs: Tensor, scale: Tensor, K: int) -> Tensor:
    """Code * scale in float32[N, K]; see `op.SparseLinear` for the arguments."""
    N, groups = scale.shape
    dtype = torch.int8 if values.dtype == torch.int8 else INT4
    codes = unpack_sparse(values, pairs, dtype, K).view(N, groups, -1)
    return (codes.to(torch.float32) * scale.to(torch.float32).unsqueeze(-1)).view(N, K)


def sparse_linear(
    x: Tensor,
    values: Tensor,
    pairs: Tensor,
    scale: Tensor,
    *,
    bias: Tensor | None = None,
    label: str = "",
) -> Tensor:
    """The rows of x times the dequantized weight, plus bias, in the dtype of x.

    Products and sums are float64; their sum is rounded to float32, bias is added, and the result is
    rounded to the dtype of x.
    """
    real = dequantize_weight(values, pairs, scale, x.shape[-1])
    total = (x.to(torch.float64) @ real.to(torch.float64).t()).to(torch.float32)
    return (total if bias is None else total + bias.to(torch.float32)).to(x.dtype)
