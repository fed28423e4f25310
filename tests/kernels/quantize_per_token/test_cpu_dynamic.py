"""quantize_per_token on CPUs, held to the definition to the last bit."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.kernels.quantize_per_token.cpu_dynamic import quantize_per_token
from pt2e_quant.kernels.quantize_per_token.reference import quantize_per_token as defined
from tests.kernels.operands import float_rows


@settings(max_examples=100)
@given(st.data(), st.integers(0, 5), st.integers(1, 70), st.sampled_from([-128, -127]))
def test_quantize_per_token_when_inputs_are_drawn_then_equals_the_definition_and_leaves_its_input(
    data, M, K, quant_min
):
    x = data.draw(float_rows((M, K)))
    before = x.clone()
    for made, expected in zip(quantize_per_token(x, quant_min), defined(x, quant_min), strict=True):
        assert made.dtype == expected.dtype
        assert torch.equal(made, expected)
    assert torch.equal(x, before)
