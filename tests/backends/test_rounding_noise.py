"""Rounding noise: of the size of float32 rounding, amplified where the graph does."""

from typing import Any

import torch
import torch.ao.quantization.fx._decomposed  # registers the operators
from torch import Tensor, nn

from pt2e_quant.backends.rounding_noise import run_with_rounding_noise
from pt2e_quant.flow.calibrate.sample import sqnr_db

Q: Any = torch.ops.quantized_decomposed


def traced(model: nn.Module, *args: Tensor) -> Any:
    return torch.export.export(model.eval(), args).module()


class Chain(nn.Module):
    """Layers that each multiply a difference, with a quantize between them or without."""

    def __init__(self, depth: int, *, quantized: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        weights = torch.randn(depth, 64, 64, generator=generator) / 8 * 3
        self.weights = nn.Parameter(weights)
        self.quantized = quantized

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.sin(x @ weight)
            if self.quantized:
                q = Q.quantize_per_tensor(x, 0.008, 128, 0, 255, torch.uint8)
                x = Q.dequantize_per_tensor(q, 0.008, 128, 0, 255, torch.uint8)
        return x


def own_noise(model: nn.Module) -> float:
    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(1))
    gm = traced(model, x)
    with torch.no_grad():
        return sqnr_db(gm(x), run_with_rounding_noise(gm, x))


def test_noise_when_graph_is_shallow_then_it_is_that_of_float32() -> None:
    assert 110 < own_noise(Chain(1, quantized=False)) < 150


def test_noise_when_quantized_graph_is_deep_then_it_is_amplified() -> None:
    shallow, deep = own_noise(Chain(1, quantized=True)), own_noise(Chain(24, quantized=True))
    assert deep < 60
    assert deep < shallow - 20


def test_noise_when_run_twice_then_it_is_the_same() -> None:
    model = Chain(4, quantized=True)
    assert own_noise(model) == own_noise(model)


def test_noise_when_inputs_are_nested_then_leaves_are_taken_in_order() -> None:
    class Nested(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor], *, scale: Tensor) -> Tensor:
            return (pair[0] - pair[1]) * scale

    a, b, c = torch.randn(3, 4).unbind(0)
    gm: Any = torch.export.export(Nested(), ((a, b),), {"scale": c}).module()
    found = run_with_rounding_noise(gm, a, b, c)
    torch.testing.assert_close(found[0] if isinstance(found, (list, tuple)) else found, (a - b) * c)
