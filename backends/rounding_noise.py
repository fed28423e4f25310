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

_NOISE = 2.0**-23
"""Relative to a result's root mean square: half a unit in the last place of float32."""


class _Noisy(Interpreter):
    """Adds rounding noise to each float result that is not a dequantize's."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm)
        self.generator = torch.Generator().manual_seed(0)

    def run_node(self, n: Node) -> Any:
        """Run one node, with noise on its result."""
        value = super().run_node(n)
        is_call = n.op == "call_function" and not is_quantize(n) and not is_dequantize(n)
        if not is_call or not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        size = value.detach().square().mean().sqrt()
        noise = torch.randn(value.shape, generator=self.generator).to(value)
        return value + noise * (size.nan_to_num(0.0, 0.0, 0.0) * _NOISE)


def run_with_rounding_noise(gm: GraphModule, *leaves: Any) -> Any:
    """The graph's result with noise of the size of float32 rounding after every operator.

    Args:
        gm: a graph; it may write its buffers, which the caller restores.
        leaves: the inputs in placeholder order.
    """
    interpreter = _Noisy(gm)
    return interpreter.run(*leaves, enable_io_processing=False)
