"""The definition of int8_add: both dequantized, combined, activated, quantized; all in float32.

This is the canonical q/dq graph in float32, to the last bit. `core.integer_ops.sums.add`, the
integer form for processors without floats, rounds the scales to 31 bits and ties upwards: it may
differ by one step, and is the definition there.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.kernels.epilogue.epilogue import Epilogue
from pt2e_quant.kernels.epilogue.reference import finish
from pt2e_quant.kernels.int8_add.broadcast import result_like
from pt2e_quant.kernels.quantize.reference import real_values

COMBINES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
}


def check_combine(combine: str) -> None:
    """Refuse an unknown name.

    Raises:
        ConfigError: no operator has it.
    """
    if combine not in COMBINES:
        raise ConfigError(f'int8_add combines by {", ".join(COMBINES)}, found "{combine}"')


def int8_add(
    x: Tensor,
    y: Tensor,
    *,
    combine: str = "add",
    x_scale: float = 1.0,
    x_zero_point: int = 0,
    y_scale: float = 1.0,
    y_zero_point: int = 0,
    label: str = "",
    **output: Any,
) -> Tensor:
    """Combine x and y; see `op.Int8Add` for the arguments."""
    check_combine(combine)
    end = Epilogue(**output)
    left = real_values(x, x_scale, x_zero_point)
    right = real_values(y, y_scale, y_zero_point)
    made = finish(COMBINES[combine](left, right), end)
    return torch.empty_like(result_like(x, y), dtype=end.out_dtype).copy_(made)
