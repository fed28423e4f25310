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


class Twice(nn.Module):
    """A linear of two tensors, the second of which stays float."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(64, 64, bias=bias), nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        first = self.layer(x)
        return first + self.layer(self.norm(first))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(2, 5, 64), (5, 64)])
def test_shared_linear_when_one_call_is_float_then_the_other_is_integer(shape, bias):
    torch.manual_seed(0)
    model, x = Twice(bias).eval(), torch.randn(shape)
    backend = pq.backends.get("onnx").allowing_slower()
    program = torch.export.export(model, (x,))
    quantizer = backend.quantizer("int8").set_node("linear_1", None)
    quantized = pq.convert(pq.calibrate(pq.prepare(program, quantizer), [x], progress=False))
    artifact = backend.lower(quantized)
    assert list(artifact.report.integer_ops.values()) == [1]
    assert pq.sqnr_db(model(x), artifact.run(x)) > 30
