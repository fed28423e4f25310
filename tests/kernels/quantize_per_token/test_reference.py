"""quantize_per_token's definition, held to torch's own operators and to exact fractions."""

from fractions import Fraction

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.core.qdq import ChoosePerToken, QuantizePerToken
from pt2e_quant.kernels.quantize_per_token.op import QuantizeRows, cost
from pt2e_quant.kernels.quantize_per_token.reference import quantize_per_token
from tests.kernels.operands import float_rows


@settings(max_examples=100)
@given(st.data(), st.integers(1, 6), st.integers(1, 40), st.sampled_from([-128, -127, -8]))
def test_quantize_per_token_when_inputs_are_drawn_then_equals_torch_to_the_last_bit(
    data, M, K, quant_min
):
    x = data.draw(float_rows((2, M, K)))
    scale, zero_point = ChoosePerToken(x, torch.int8)
    wanted = QuantizePerToken(x, scale, zero_point, quant_min, 127, torch.int8)
    integers, ours, our_zero = quantize_per_token(x, quant_min)
    assert torch.equal(integers, wanted)
    assert torch.equal(ours.double(), scale)
    assert torch.equal(our_zero.long(), zero_point)


@settings(max_examples=60)
@given(st.data(), st.integers(2, 20))
def test_quantize_per_token_when_inputs_are_drawn_then_every_element_is_within_a_step_of_its_value(
    data, K
):
    x = data.draw(float_rows((K,), dtypes=(torch.float32,)))
    integers, scale, zero_point = quantize_per_token(x)
    step = Fraction(scale.item())
    for value, integer in zip(x.tolist(), integers.tolist(), strict=True):
        made = (integer - zero_point.item()) * step
        # The range's ends may be off by the zero point's own rounding, another half.
        assert abs(made - Fraction(value)) <= step * Fraction(100001, 100000)


def test_operator_when_checked_by_torch_then_is_whole():
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    torch.library.opcheck(QuantizeRows, (x,), {"label": "block.norm"})
    assert [t.shape for t in QuantizeRows(x)] == [(2, 3, 8), (2, 3, 1), (2, 3, 1)]


def test_cost_when_counted_then_has_each_tensor_once():
    assert cost(torch.zeros(4, 8)).bytes == 4 * 8 * 4 + 4 * 8 + 4 * 8
