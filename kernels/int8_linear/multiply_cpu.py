"""int8_linear on CPUs: torch's integer product where it is exact, the definition's epilogue."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from pt2e_quant.kernels.epilogue.epilogue import Epilogue
from pt2e_quant.kernels.epilogue.reference import finish
from pt2e_quant.kernels.int8_linear import reference


@cache
def int_mm_is_exact() -> bool:
    """True if `torch._int_mm` gives exact sums of the extreme int8 values here.

    Without VNNI it adds pairs of products in 16 bits, which saturate silently. Tried once a
    process, for one row and for many: they are different kernels.
    """
    return all(_is_exact(rows, value) for rows in (1, 16) for value in (-128, 127))


def _is_exact(rows: int, value: int) -> bool:
    # Without VNNI oneDNN adds 128 to signed values first: of -128 all products are 0.
    x = torch.full((rows, 64), value, dtype=torch.int8)
    weight = torch.full((64, 16), -127, dtype=torch.int8)
    return bool((torch._int_mm(x, weight) == value * -127 * 64).all())


def int8_linear(
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_sum: Tensor,
    *,
    label: str = "",
    **epilogue: Any,
) -> Tensor:
    """Equal to `reference.int8_linear` to the last bit; see `op.Int8Linear` for the arguments."""
    # Of one input feature torch 2.13's product is memory that nothing was written to.
    is_empty = x.numel() == 0 or weight.numel() == 0
    if is_empty or x.shape[-1] == 1 or not int_mm_is_exact():
        return reference.int8_linear(
            x, x_scale, x_zero_point, weight, weight_scale, weight_sum, **epilogue
        )
    total = torch._int_mm(x.reshape(-1, x.shape[-1]), weight.t())
    total.sub_(x_zero_point.reshape(-1, 1) * weight_sum)
    real = total.float().mul_(x_scale.reshape(-1, 1) * weight_scale)
    return finish(real.reshape(*x.shape[:-1], weight.shape[0]), Epilogue(**epilogue))


def written_out(
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_sum: Tensor,
    *,
    label: str = "",
    **epilogue: Any,
) -> Tensor:
    """`int8_linear` in torch's operators, for tracers, where `int_mm_is_exact`."""
    if x.shape[-1] == 1:
        return reference.int8_linear(
            x, x_scale, x_zero_point, weight, weight_scale, weight_sum, **epilogue
        )
    total = torch._int_mm(x.reshape(-1, x.shape[-1]), weight.t())
    total = total - x_zero_point.reshape(-1, 1) * weight_sum
    real = total.float() * (x_scale.reshape(-1, 1) * weight_scale)
    return finish(real.reshape(*x.shape[:-1], weight.shape[0]), Epilogue(**epilogue))
