import torch
from torch import nn

from pt2e_quant.core.qdq import DequantizePerTensor, QuantizePerTensor
from pt2e_quant.passes.qdq.duplicate_dequantize import duplicate_dequantize, one_reader

QPARAMS = (0.1, 0, -128, 127, torch.int8)
X = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))


class Shared(nn.Module):
    def forward(self, x):
        d = DequantizePerTensor(QuantizePerTensor(x, *QPARAMS), *QPARAMS)
        return d.relu() + d, d * d


def test_dequantize_when_it_has_many_readers_then_each_gets_its_own(program):
    p = program(Shared(), (X,))
    assert one_reader.check(p.gm) == "dequantize_per_tensor shared"
    p.apply(duplicate_dequantize)
    q = "x: f32[2, 3] = input\nquantize_per_tensor: i8[2, 3] = "
    q += "quantized_decomposed.quantize_per_tensor(x, 0.1, 0, -128, 127, i8)\n"
    d = "quantized_decomposed.dequantize_per_tensor(quantize_per_tensor, 0.1, 0, -128, 127, i8)\n"
    assert p.text == (
        f"{q}dequantize_per_tensor: f32[2, 3] = {d}"
        "relu: f32[2, 3] = relu(dequantize_per_tensor)\n"
        f"dequantize_per_tensor_1: f32[2, 3] = {d}"
        "add: f32[2, 3] = add(relu, dequantize_per_tensor_1)\n"
        f"dequantize_per_tensor_2: f32[2, 3] = {d}"
        "mul: f32[2, 3] = mul(dequantize_per_tensor_2, dequantize_per_tensor_2)\n"
        "return (add, mul)\n"
    )
    p.matches(rtol=0, atol=0).is_idempotent(duplicate_dequantize)


def test_dequantize_when_it_has_one_reader_then_left_alone(program):
    class One(nn.Module):
        def forward(self, x):
            return DequantizePerTensor(QuantizePerTensor(x, *QPARAMS), *QPARAMS) + 1

    p = program(One(), (X,)).apply(duplicate_dequantize)
    assert not p.changed
