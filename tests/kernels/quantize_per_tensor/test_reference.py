"""quantize_per_tensor's definition, held to torch's own operators and to exact fractions."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.core.formats.format_ops import ChooseScales, QuantizeFloat
from pt2e_quant.core.qdq import (
    ChoosePerTensor,
    ChoosePerTensorSymmetric,
    QuantizePerTensorDynamic,
)
from pt2e_quant.kernels.quantize_per_tensor.op import QuantizeTensor, QuantizeTensorE4m3, cost
from pt2e_quant.kernels.quantize_per_tensor.reference import (
    quantize_per_tensor,
    quantize_per_tensor_e4m3,
)
from tests.kernels.e4m3_values import same_codes
from tests.kernels.operands import float_rows

RANGES = st.sampled_from([(-128, 127), (-127, 127), (-8, 7), (0, 127)])


@settings(max_examples=100)
@given(st.data(), st.integers(1, 6), st.integers(1, 40), RANGES, st.booleans())
def test_quantize_per_tensor_when_inputs_are_drawn_then_equals_torch_to_the_last_bit(
    data, M, K, limits, symmetric
):
    x = data.draw(float_rows((M, K)))
    eps = data.draw(st.sampled_from([2.0**-23, 1e-12, 0.3]))
    choose = ChoosePerTensorSymmetric if symmetric else ChoosePerTensor
    scale, zero_point = choose(x, *limits, eps, torch.int8)
    wanted = QuantizePerTensorDynamic(x, scale, zero_point, *limits, torch.int8)
    integers, ours, our_zero = quantize_per_tensor(x, *limits, eps, symmetric)
    assert torch.equal(integers, wanted)
    assert torch.equal(ours.double(), scale)
    assert torch.equal(our_zero.long(), zero_point)


@settings(max_examples=60)
@given(st.data(), st.integers(1, 6), st.integers(1, 40))
def test_codes_when_inputs_are_drawn_then_equal_our_operators_to_the_last_bit(data, M, K):
    x = data.draw(float_rows((M, K)))
    scale = ChooseScales(x, None, [-1, -1], 448.0, torch.float32)
    wanted = QuantizeFloat(x, scale, None, [-1, -1], "float8_e4m3fn")
    codes, ours = quantize_per_tensor_e4m3(x)
    assert same_codes(codes, wanted)
    assert torch.equal(ours, scale)


@settings(max_examples=60)
@given(st.data(), st.integers(2, 20), st.booleans())
def test_quantize_per_tensor_when_inputs_are_drawn_then_every_element_is_within_a_step_of_its_value(
    data, K, symmetric
):
    x = data.draw(float_rows((K,), dtypes=(torch.float32,)))
    integers, scale, zero_point = quantize_per_tensor(x, symmetric=symmetric)
    step = Fraction(scale.item())
    for value, integer in zip(x.tolist(), integers.tolist(), strict=True):
        made = (integer - zero_point.item()) * step
        # The range's ends may be off by the zero point's own rounding, another half.
        assert abs(made - Fraction(value)) <= step * Fraction(100001, 100000)


@pytest.mark.parametrize("op", [QuantizeTensor, QuantizeTensorE4m3])
def test_operators_when_checked_by_torch_then_are_whole(op):
    x = torch.randn(2, 3, 8, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    for laid in (x, x.to(memory_format=torch.channels_last), x[:, :, ::2]):
        torch.library.opcheck(op, (laid,), {"label": "block.norm"})
    scale = [1] if op is QuantizeTensor else [1, 1, 1, 1]
    assert [list(t.shape) for t in op(x)][:2] == [[2, 3, 8, 5], scale]


def test_cost_when_counted_then_reads_the_tensor_twice():
    assert cost(torch.zeros(4, 8)).bytes == 2 * 4 * 8 * 4 + 4 * 8
