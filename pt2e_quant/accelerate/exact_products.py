"""Products of integers by float kernels: torch's `out_dtype` on CPUs in a third of its time.

torch multiplies integers on CPUs in loops without vector units, one group of a convolution after
the other. `out_dtype` leaves the precision of its arithmetic open, so that a float kernel may
compute it wherever each of its partial sums is an exact number. That needs no VNNI.
"""

import platform
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DispatchKey
from torch._higher_order_ops.out_dtype import out_dtype, out_dtype_dense
from torch.utils._python_dispatch import _get_current_dispatch_mode

from pt2e_quant.accelerate.patch import Patch

PATCH = Patch(
    name="exact_products",
    saves="half to four fifths of the time of `out_dtype` in an integer reference on a CPU",
    versions={"torch": "2.13"},
)

_aten: Any = torch.ops.aten
_EXACT = 1 << 24
"""Up to here every integer is a float32."""
_NARROW = 1 << 8
"""Up to here every integer is a TF32 and a bfloat16 too, by which a kernel may multiply."""
_LIMB = 16


def install() -> None:
    """Give `out_dtype` kernels for CPUs, once a process; they give the same integers."""
    if DispatchKey.CPU not in out_dtype.py_kernels and PATCH.is_on():
        out_dtype.py_impl(DispatchKey.CPU)(_on_cpu)
        out_dtype.py_impl(DispatchKey.AutogradCPU)(_below_autograd)


def _below_autograd(op: Any, dtype: torch.dtype, *args: Any) -> Any:
    """The kernel at once where autograd and modes have no part in it: half of a call's overhead."""
    if _get_current_dispatch_mode() is None and all(map(_is_plain, args)) and PATCH.is_on():
        return _on_cpu(op, dtype, *args)
    return out_dtype.py_kernels[DispatchKey.Autograd](op, dtype, *args)


def _is_plain(value: Any) -> bool:
    return not isinstance(value, Tensor) or (
        type(value) in (Tensor, nn.Parameter)
        and not value.requires_grad
        and not torch._is_functional_tensor(value)
    )


def _on_cpu(op: Any, dtype: torch.dtype, *args: Any) -> Any:
    made = None
    if PATCH.is_on() and not dtype.is_floating_point:
        if sums_rows(op, *args):
            made = exact_product(op, dtype, *args)
        elif op is _aten.mul.Tensor and not any(_is_float(a) for a in args):
            made = _multiplied(dtype, *args)
    return out_dtype_dense(op, dtype, *args) if made is None else made


def _multiplied(dtype: torch.dtype, left: Any, right: Any) -> Tensor | None:
    """The product with one new tensor; None where no factor has its shape."""
    if isinstance(right, Tensor):
        if left.numel() < right.numel():
            left, right = right, left
        shape: torch.Size = torch.broadcast_shapes(left.shape, right.shape)  # type: ignore[no-untyped-call]  # torch's
        if shape != left.shape:
            return None
        right = right.to(dtype)
    made: Tensor = left.to(dtype, copy=True)
    return made.mul_(right)


def _is_float(value: Any) -> bool:
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return is_float or isinstance(value, float)


def sums_rows(op: Any, *args: Any) -> bool:
    """True if each result of a product is a sum of products with one row weight[n]."""
    if op is _aten.linear.default:
        return len(args) < 3 or args[2] is None
    return op is _aten.convolution.default and args[2] is None and not args[6]  # transposed


def exact_product(
    op: Any, dtype: torch.dtype, left: Tensor, right: Tensor, *rest: Any
) -> Tensor | None:
    """A linear or convolution of integers without a bias, by float32 kernels.

    No partial sum is above max(abs(x)) times the greatest sum of abs(w). float32 holds it, or those
    of two limbs of x.

    Args:
        op: with `sums_rows`.
        dtype: of the result.
        left: integers, or floats that hold integers.
        right: the weight, likewise.
        rest: the other arguments.

    Returns:
        The exact result; None where float32 may not hold it, or a kernel may be another than the
        sum of products (Winograd's, or one that autocast chooses).
    """
    if torch.is_autocast_enabled(left.device.type) or not _sums_directly(op):
        return None
    reach, weight_reach = _reach(left), _reach(right)
    if reach > _NARROW or weight_reach > _NARROW:
        return None
    weight = right.float()
    longest = weight_reach * (right[0].numel() if len(right) else 0)
    if reach * longest >= _EXACT and left.numel() >= right.numel():
        # The greatest sum of abs(w); exact below 2**24.
        longest = int(torch.linalg.vector_norm(weight.flatten(1), 1, dim=1).amax())
    if reach * longest < _EXACT:
        return _product(op, left.float(), weight, *rest).to(dtype)
    if _LIMB * longest >= _EXACT:
        return None
    low = left.to(torch.float32, copy=True)
    high = low.div(_LIMB).round_()
    low.sub_(high, alpha=_LIMB)
    total = _product(op, high, weight, *rest).to(dtype).mul_(_LIMB)
    return total.add_(_product(op, low, weight, *rest).to(dtype))


def _product(op: Any, *args: Any) -> Tensor:
    made: Tensor = op(*args)
    return made


def _sums_directly(op: Any) -> bool:
    """True if torch's float convolutions add products, as oneDNN's do on x86-64."""
    if op is _aten.linear.default:
        return True
    onednn: Any = torch.backends.mkldnn
    is_on: bool = onednn.is_available() and onednn.enabled
    return is_on and platform.machine() in ("x86_64", "AMD64")


def _reach(x: Tensor) -> int:
    if x.numel() == 0:
        return 0
    low, high = torch.aminmax(x)
    return max(abs(int(low)), abs(int(high)))
