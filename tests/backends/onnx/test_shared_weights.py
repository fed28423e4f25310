"""Layers that share one weight, as ALBERT's: each product runs in integers, the weight is once."""

import pytest
import torch
from torch import Tensor, nn

import pt2e_quant as pq

pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")


class Shared(nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.layer = nn.Linear(256, 256)
        self.norm = nn.LayerNorm(256)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.norm(torch.relu(self.layer(x)))
        return x


@pytest.mark.parametrize("recipe", ["int8", "int8_dynamic"])
@pytest.mark.parametrize("shape", [(2, 5, 256), (5, 256)])
def test_shared_linear_when_lowered_then_each_is_integer_and_the_weight_stored_once(recipe, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    made = [
        pq.quantize(
            Shared(times).eval(), args=(x,), calibration_data=[x], backend="onnx", recipe=recipe
        )
        for times in (1, 3)
    ]
    products = [
        sum(
            n
            for op, n in a.report.integer_ops.items()
            if op.startswith(("MatMul", "QLinear", "QGemm"))
        )
        for a in made
    ]
    assert products == [1, 3]
    assert made[1].report.sqnr_canonical_db > 40
    assert made[1].size_bytes - made[0].size_bytes < 256 * 256
