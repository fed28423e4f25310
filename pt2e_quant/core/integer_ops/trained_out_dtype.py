"""torch's out_dtype with a gradient, which torch leaves out (up to 2.13 at least).

`torch.ops.higher_order.out_dtype` raises "Autograd not implemented for out_dtype" where a tensor
requires a gradient. Integers have none, so they travel in float tensors here.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.out_dtype import ALLOWABLE_OPS

from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.core.integer_ops.calls import out_dtype as torch_out_dtype


def out_dtype(op: Any, dtype: torch.dtype, *args: Any) -> Tensor:
    """`op` on integers, accumulated in dtype; float tensors that hold integers train.

    The forward pass is `torch.ops.higher_order.out_dtype` on the integers. The backward pass is
    that of the float operator at the same values (straight-through).

    Args:
        op: an operator that torch's out_dtype takes (mm, linear, convolution, mul); or add and
            sub, which it does not take: they are computed in dtype here.
        dtype: int32 or int64.
        args: of the operator. Values of float tensors are rounded to integers.

    Returns:
        Of dtype if no tensor among args is float; else float64 with the exact integers.

    Raises:
        UnsupportedError: dtype is no integer dtype, or op is another operator.

    >>> x = torch.tensor([[3.0, -2.0]], requires_grad=True)
    >>> w = torch.tensor([[5.0], [7.0]], requires_grad=True)
    >>> total = out_dtype(torch.ops.aten.mm.default, torch.int32, x, w)
    >>> total.backward()
    >>> total.item(), x.grad.tolist()
    (1.0, [[5.0, 7.0]])
    """
    if dtype not in (torch.int32, torch.int64):
        raise UnsupportedError(
            f"out_dtype trains with accumulators of int32 or int64, found {dtype}",
            fix="torch.ops.higher_order.out_dtype for other dtypes, without a gradient",
        )
    if op not in _SUMS and op not in ALLOWABLE_OPS:
        known = ", ".join(str(o) for o in (*ALLOWABLE_OPS, *_SUMS))
        raise UnsupportedError(f"out_dtype takes no {op}", fix=f"one of {known}")
    if not any(_is_float(a) for a in args):
        return _accumulated(op, dtype, args)
    integers = [a.detach().round().to(dtype) if _is_float(a) else a for a in args]
    exact = _accumulated(op, dtype, integers)
    # In float64 the operator is exact on integers, and so is this sum.
    estimate: Tensor = op(*(a.double() if isinstance(a, Tensor) else a for a in args))
    return estimate + (exact - estimate).detach()


_aten: Any = torch.ops.aten
_SUMS = (_aten.add.Tensor, _aten.sub.Tensor)


def _accumulated(op: Any, dtype: torch.dtype, args: Sequence[Any]) -> Tensor:
    if op in _SUMS:
        summed: Tensor = op(*(a.to(dtype) if isinstance(a, Tensor) else a for a in args))
        return summed
    exact: Tensor = torch_out_dtype(op, dtype, *args)
    return exact


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
