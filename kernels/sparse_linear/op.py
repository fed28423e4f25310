"""The operator `pt2e_quant::sparse_linear`, which quantized tensors of eager modules call."""

from typing import Any

from torch import Tensor

from pt2e_quant.kernels.cost import Cost, moved_bytes
from pt2e_quant.kernels.fused_op import define, triton_kernel
from pt2e_quant.kernels.sparse_linear import reference


def _fake(x: Tensor, values: Tensor, *rest: Any, **named: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], values.shape[0]))


SparseLinear = define(
    "sparse_linear(Tensor x, Tensor values, Tensor pairs, Tensor scale, *, Tensor? bias=None, "
    'str label="") -> Tensor',
    reference=reference.sparse_linear,
    triton=triton_kernel("pt2e_quant.kernels.sparse_linear.gpu", "sparse_linear"),
    fake=_fake,
)
"""y = sum_k x * code * scale + bias, where two of each four neighbours along k are kept.

    x: float16, bfloat16 or float32[..., K], finite; K is a multiple of 4.
    values: the kept codes, int8[N, K / 2], or two of 4 bits a byte, uint8[N, K / 4].
    pairs: uint8[N, ceil(3 K / 32)], which two, as `pack.pack_sparse` writes them.
    scale: float16, bfloat16 or float32[N, 1], or [N, K / G] for groups of a multiple of 32.
    bias: float[N].
    label: the node and layout, for the profiler.
"""


def cost(x: Tensor, values: Tensor, pairs: Tensor, scale: Tensor, out: Tensor) -> Cost:
    """Bytes and operations of one call, those of the zeros included.

    A weight is 0.59 bytes of 8 bits and 0.34 of 4.
    """
    K = x.shape[-1]
    rows = x.numel() // max(1, K)
    return Cost(
        bytes=moved_bytes(x, values, pairs, scale, out),
        operations=2 * rows * values.shape[0] * K,
    )


def takes_groups(groups: int, K: int) -> bool:
    """True if rows of K have so many groups that the kernel scales them one by one."""
    return groups == 1 or (K % groups == 0 and K // groups % 32 == 0)
