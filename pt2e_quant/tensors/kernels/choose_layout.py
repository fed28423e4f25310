"""The layout that a weight gets where nobody names one."""

from pt2e_quant.tensors.kernels.dispatch import KERNELS, find_kernel
from pt2e_quant.tensors.layouts.table import LAYOUTS
from pt2e_quant.tensors.quantized_tensor import QuantizedTensor


def layouts_with_kernels(tensor: QuantizedTensor) -> list[str]:
    """The layouts that take a weight and have a kernel for linears with it, where it is."""
    plain = tensor.form.with_layout("plain")
    device = tensor.device.type
    # Looking a form up takes longer than both of these.
    served = {
        kernel.layout for kernel in KERNELS if (kernel.op, kernel.device) == ("linear", device)
    }
    found = []
    for name, layout in LAYOUTS.items():
        if name not in served or layout.refusal(plain):
            continue
        form = plain.with_layout(name)
        if find_kernel("linear", form, device, tensor.dtype) is not None:
            found.append(name)
    return found


def best_layout(tensor: QuantizedTensor, *, gathers: bool = False) -> str:
    """The layout of the last kernel in the table that takes a weight, else the smallest.

    Args:
        tensor: the weight.
        gathers: an embedding reads its rows too, which opaque layouts do not hold one by one.
    """
    smallest = "packed" if tensor.form.scheme.bits < 8 else "plain"
    if gathers or len(tensor.form.shape) != 2:
        return smallest
    order = [kernel.layout for kernel in reversed(KERNELS)]
    fitting = layouts_with_kernels(tensor)
    return min(fitting, key=order.index) if fitting else smallest
