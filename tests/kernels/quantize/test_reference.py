"""quantize's definition, held to torch's own q/dq and operators."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.core.qdq import DequantizePerTensor, QuantizePerTensor
from pt2e_quant.kernels.quantize.op import Quantize, cost
from pt2e_quant.kernels.quantize.reference import quantize
from tests.kernels.operands import float_rows, integers

SCALES = st.sampled_from([2.0**-9, 0.0037, 0.1, 5.0])


@settings(max_examples=60)
@given(st.data(), SCALES, st.integers(-128, 127), st.sampled_from([-128, -127]))
def test_quantize_when_integers_are_written_then_equals_torch_to_the_last_bit(
    data, scale, zero_point, low
):
    x = data.draw(float_rows((3, 40)))
    made = quantize(
        x, out_dtype=torch.int8, out_scale=scale, out_zero_point=zero_point, out_min=low
    )
    assert torch.equal(made, QuantizePerTensor(x, scale, zero_point, low, 127, torch.int8))


@settings(max_examples=30)
@given(st.data(), SCALES, st.integers(0, 255), st.sampled_from([torch.float32, torch.bfloat16]))
def test_quantize_when_integers_are_read_then_equals_torchs_dequantize_to_the_last_bit(
    data, scale, zero_point, dtype
):
    x = data.draw(integers((3, 40), low=0, high=255, dtype=torch.uint8))
    made = quantize(x, x_scale=scale, x_zero_point=zero_point, out_dtype=dtype)
    wanted = DequantizePerTensor(x, scale, zero_point, 0, 255, torch.uint8, out_dtype=dtype)
    assert torch.equal(made, wanted)


def test_quantize_when_a_function_is_in_between_then_it_is_in_float32():
    x = torch.arange(-128, 128, dtype=torch.int8)
    real = torch.nn.functional.silu(DequantizePerTensor(x, 0.05, 3, -128, 127, torch.int8))
    made = quantize(
        x, x_scale=0.05, x_zero_point=3, activation="silu", out_dtype=torch.int8, out_scale=0.03
    )
    assert torch.equal(made, QuantizePerTensor(real, 0.03, 0, -128, 127, torch.int8))


def test_operator_when_checked_by_torch_then_is_whole_and_keeps_strides():
    x = torch.randint(-128, 128, (2, 3, 4, 5), dtype=torch.int8).to(
        memory_format=torch.channels_last
    )
    named = {"x_scale": 0.1, "activation": "relu", "out_dtype": torch.float16}
    torch.library.opcheck(Quantize, (x,), named)
    torch.library.opcheck(Quantize, (x[..., ::2],), named)
    assert Quantize(x, **named).stride() == x.stride()


def test_cost_when_counted_then_has_each_tensor_once():
    x = torch.zeros(100, dtype=torch.int8)
    assert cost(x, x.float()).bytes == 500
