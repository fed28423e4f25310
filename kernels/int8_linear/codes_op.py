"""The operator `pt2e_quant::linear_of_codes`: float rows by integer weights, for any CPU.

CPUs without VNNI have no fast product of 8-bit integers. Multiplying by the integers and scaling
the result saves a pass over the weight, and a block of it at a time stays in the cache.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pt2e_quant.kernels.fused_op import fake_linear

_LIBRARY = torch.library.Library("pt2e_quant", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's own

_BLOCK = 1 << 20
"""Elements of a weight that are made float together: 4 MiB, part of the last cache."""
_SMALL = 1 << 19
"""Elements up to which blocks cost more than they save when several threads share many rows."""


def linear_of_codes(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """`LinearOfCodes`, without an operator's own cost in eager calls."""
    is_few = x.numel() <= codes.shape[-1] or torch.get_num_threads() == 1
    if codes.numel() <= (_BLOCK if is_few else _SMALL):
        real = codes.to(x.dtype)
        sums = F.linear(x, real if zero_point is None else real.sub_(zero_point))
    else:
        rows = _in_blocks(x.reshape(-1, x.shape[-1]), codes, zero_point)
        sums = rows.t().contiguous().view(*x.shape[:-1], codes.shape[0])
    return sums.mul_(scale) if bias is None else torch.addcmul(bias, sums, scale)


def _in_blocks(rows: Tensor, codes: Tensor, zero_point: Tensor | None) -> Tensor:
    """Sums float[N, M] of the products with a large weight."""
    N, K = codes.shape
    step = min(N, max(1, _BLOCK // K))
    real, sums = rows.new_empty((step, K)), rows.new_empty((N, len(rows)))
    for start in range(0, N, step):
        part = codes[start : start + step]
        block = real[: len(part)].copy_(part)
        if zero_point is not None:
            block.sub_(zero_point if len(zero_point) == 1 else zero_point[start : start + step])
        # With more than one thread up to three times as fast as rows by a transposed block.
        torch.mm(block, rows.t(), out=sums[start : start + step])
    return sums


_LIBRARY.define(  # type: ignore[no-untyped-call]
    "linear_of_codes(Tensor x, Tensor codes, Tensor scale, Tensor? zero_point=None, "
    "Tensor? bias=None) -> Tensor"
)
# Explicit: Inductor's own loops over 8-bit integers take several times as long on such CPUs.
torch.library.impl(_LIBRARY, "linear_of_codes", "CompositeExplicitAutograd")(linear_of_codes)
torch.library.register_fake("pt2e_quant::linear_of_codes", lib=_LIBRARY)(
    fake_linear(weight=1, axis=0)
)

LinearOfCodes: Any = torch.ops.pt2e_quant.linear_of_codes.default
"""y = (x @ (codes - zero_point).t()) * scale + bias.

    x: float32[..., K].
    codes: int8 or uint8 [N, K].
    scale: float32[N] or [1].
    zero_point: integers [N, 1] or [1, 1]; None for 0.
    bias: float32[N].

Integers of up to 8 bits are exact in float32, and so are the sums of integers x below 2 ** 24.
"""
