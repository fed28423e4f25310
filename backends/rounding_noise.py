"""How far apart two correct computations of one graph are, by float rounding alone.

A deep quantized graph can amplify rounding: a sum that differs in its last bit moves one value in
a hundred thousand by a quantization step, the next layer more of them, and after twelve blocks a
fifth of the values differ. No artifact can then be nearer to the graph than the graph is to itself
on another machine.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from pt2e_quant.core.qdq import is_dequantize, is_quantize

__all__ = ["run_with_rounding_noise"]

aten = torch.ops.aten

_SUMMED = 2.0**-21
"""Noise of an operator that sums, relative to its result's root mean square.

Torch's float32 products on a CPU are 1.2 (64 terms), 2.4 (512) to 3.0 (8192) times 2^-23 from their
float64 result, and two computations that share nothing but that are sqrt(2) times further apart.
"""

_ROUNDED = 2.0**-23
"""Noise of any other operator, relative to each element: one rounding or an approximated function
(0.2 to 0.6 times 2^-23, measured likewise), of two computations."""

_SUMS = frozenset(
    packet
    for name in (
        *("linear", "mm", "bmm", "addmm", "baddbmm", "matmul", "einsum", "dot", "mv"),
        *("conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d"),
        *("conv_transpose3d", "scaled_dot_product_attention", "sum", "mean", "avg_pool1d"),
        *("avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "var", "std"),
        *("batch_norm", "layer_norm", "group_norm", "instance_norm", "native_layer_norm"),
        *("cumsum", "lstm", "gru", "linalg_vector_norm", "cdist"),
    )
    if (packet := getattr(aten, name, None)) is not None
)
"""The operators that add up many products or values."""


class _Noisy(Interpreter):
    """Adds rounding noise to each float result of arithmetic.

    A dequantize's result is exact by definition, and a view's is its input.
    """

    def __init__(self, gm: GraphModule, draw: int) -> None:
        super().__init__(gm)
        self.generator = torch.Generator().manual_seed(draw)

    def run_node(self, n: Node) -> Any:
        """Run one node, with noise on its result."""
        value = super().run_node(n)
        if n.op != "call_function" or is_quantize(n) or is_dequantize(n) or _is_view(n):
            return value
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        noise = torch.randn(value.shape, generator=self.generator).to(value)
        if getattr(n.target, "overloadpacket", None) in _SUMS:
            size = value.detach().square().mean().sqrt() * _SUMMED
        else:
            size = value.detach().abs() * _ROUNDED
        return value + noise * size.nan_to_num(0.0, 0.0, 0.0)


def _is_view(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


def run_with_rounding_noise(gm: GraphModule, *leaves: Any, draw: int = 0) -> Any:
    """The graph's result with noise of the size of float32 rounding after every operator.

    Args:
        gm: a graph; it may write its buffers, which the caller restores.
        leaves: the inputs in placeholder order.
        draw: which noise; the same draw of the same graph on as many threads is the same result.
    """
    return _Noisy(gm, draw).run(*leaves, enable_io_processing=False)
