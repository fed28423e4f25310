"""The operator `pt2e_quant::linear_of_groups`: 4-bit weights in groups, by the rows there are."""

import math
from typing import Any

import torch
from torch import Tensor

from pt2e_quant.kernels.int4_linear.few_rows_op import FEW_ROWS, linear_of_int4
from pt2e_quant.kernels.onednn.limbs_op import linear_of_limbs

_LIBRARY = torch.library.Library("pt2e_quant", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's own


def linear_of_groups(
    x: Tensor,
    packed: Tensor,
    group_size: int,
    scales: Tensor,
    columns: int,
    *limbs: Tensor,
) -> Tensor:
    """float32 rows times 4-bit weights in groups; see `LinearOfGroups`."""
    sizes = x.shape[:-1]
    # A tracer's symbols have no value yet: there the form that is good for any number is taken.
    is_known = all(type(size) is int for size in sizes)
    if is_known and math.prod(sizes) <= FEW_ROWS:
        bias = limbs[6] if len(limbs) > 6 else None
        return linear_of_int4(x, packed, group_size, scales, columns, bias)
    return linear_of_limbs(x, *limbs)


_LIBRARY.define(  # type: ignore[no-untyped-call]
    "linear_of_groups(Tensor x, Tensor packed, int group_size, Tensor scales, int columns, "
    "Tensor packed_high, Tensor scale_high, Tensor zeros, Tensor shifts, Tensor packed_low, "
    "Tensor scale_low, Tensor? bias=None) -> Tensor"
)
# Implicit, so that exporters and compilers see the calls it is made of.
torch.library.impl(_LIBRARY, "linear_of_groups", "CompositeImplicitAutograd")(linear_of_groups)

LinearOfGroups: Any = torch.ops.pt2e_quant.linear_of_groups.default
"""`LinearOfInt4` of at most four rows, else `LinearOfLimbs`: both weights are kept.

The arguments are those of the first but for its bias, then those of the second but for x.
"""
