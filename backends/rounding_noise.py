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
from pt2e_quant.graph.ops import arguments

__all__ = ["NoisyInterpreter", "ShiftedInterpreter", "run_with_rounding_noise"]

aten = torch.ops.aten

_SUMMED = 2.0**-21
"""Noise of an operator that sums, relative to its result's root mean square.

Torch's float32 products on a CPU are 1.2 (64 terms), 2.4 (512) to 3.0 (8192) times 2^-23 from their
float64 result, and two computations that share nothing but that are sqrt(2) times further apart.
"""

_DISTURBED = 0.01
"""Noise of an operator that sums where runtimes compute their own way, relative likewise: 40 dB.
Three such operators one behind the other are as far apart as the gate lets float results be."""

_STEPS = 1 / 8
"""The share of quantized elements that such a runtime rounds to a neighbouring step."""

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


class NoisyInterpreter(Interpreter):
    """Adds rounding noise to each float result of arithmetic.

    A dequantize's result is exact by definition, and a view's is its input.

    Args:
        gm: the graph.
        draw: which noise.
        is_disturbed: see `run_with_rounding_noise`.
    """

    def __init__(self, gm: GraphModule, draw: int, *, is_disturbed: bool) -> None:
        super().__init__(gm)
        self.generator = torch.Generator().manual_seed(draw)
        self.is_disturbed = is_disturbed

    def run_node(self, n: Node) -> Any:
        """Run one node, with noise on its result."""
        value = super().run_node(n)
        if n.op != "call_function" or is_dequantize(n) or _is_view(n):
            return value
        if is_quantize(n):
            return self._stepped(n, value) if self.is_disturbed else value
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        noise = torch.randn(value.shape, generator=self.generator).to(value)
        if getattr(n.target, "overloadpacket", None) in _SUMS:
            relative = _DISTURBED if self.is_disturbed else _SUMMED
            size = value.detach().square().mean().sqrt() * relative
        else:
            size = value.detach().abs() * _ROUNDED
        return value + noise * size.nan_to_num(0.0, 0.0, 0.0)

    def _stepped(self, quantize: Node, value: Any) -> Any:
        """Some of a quantize's integers moved by a step, within the range that it clamps to."""
        values = arguments(quantize)
        bounds = values.get("quant_min"), values.get("quant_max")
        if not isinstance(value, Tensor) or not all(isinstance(b, int) for b in bounds):
            return value
        moved = torch.rand(value.shape, generator=self.generator) < _STEPS
        up = torch.rand(value.shape, generator=self.generator) < 0.5
        steps = torch.where(up, 1, -1) * moved
        return (value.long() + steps.to(value.device)).clamp(*bounds).to(value.dtype)


class ShiftedInterpreter(Interpreter):
    """Adds a number to one value.

    Args:
        gm: the graph.
        place: the node whose value is shifted.
        by: the number.
    """

    def __init__(self, gm: GraphModule, place: Node, by: float) -> None:
        super().__init__(gm)
        self.place = place
        self.by = by

    def run_node(self, n: Node) -> Any:
        """Run one node."""
        value = super().run_node(n)
        return value + self.by if n is self.place else value


def _is_view(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


def run_with_rounding_noise(
    gm: GraphModule, *leaves: Any, draw: int = 0, is_disturbed: bool = False
) -> Any:
    """The graph's result with noise of the size of float32 rounding after every operator.

    Args:
        gm: a graph; it may write its buffers, which the caller restores.
        leaves: the inputs in placeholder order.
        draw: which noise; the same draw of the same graph on as many threads is the same result.
        is_disturbed: as far apart as runtimes may be that round values their own way: sums by
            40 dB, and one integer in eight by a step.
    """
    return NoisyInterpreter(gm, draw, is_disturbed=is_disturbed).run(
        *leaves, enable_io_processing=False
    )
