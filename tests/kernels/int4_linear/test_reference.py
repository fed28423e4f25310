"""int4_linear's definition, held to exact fractions, and its operator."""

from fractions import Fraction

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.kernels.int4_linear.op import Int4Linear, cost
from pt2e_quant.kernels.int4_linear.pack import unpack_codes
from pt2e_quant.kernels.int4_linear.reference import int4_linear
from tests.kernels.grouped_operands import int4_operands


def exact(operands):
    """Sums of fractions: nothing is rounded but each weight, to float32."""
    x, weight, scale, zero_point, size = operands
    codes = unpack_codes(weight, x.shape[1]).tolist()
    scales = scale.float().t()
    zeros = torch.full(scale.shape, 8).t() if zero_point is None else zero_point.t().int()
    rows = []
    for row in x.tolist():
        made = []
        for n, column in enumerate(codes):
            total = Fraction(0)
            for k, (a, code) in enumerate(zip(row, column, strict=True)):
                real = (code - zeros[n, k // size]).float() * scales[n, k // size]
                total += Fraction(a) * Fraction(float(real))
            made.append(float(total))
        rows.append(made)
    return torch.tensor(rows, dtype=torch.float64)


@settings(max_examples=25)
@given(st.data(), st.integers(1, 3), st.integers(1, 4))
def test_int4_linear_when_inputs_are_drawn_then_is_the_exact_sum_rounded(data, M, N):
    operands = data.draw(int4_operands(M, N, most_k=70))
    made, wanted = int4_linear(*operands), exact(operands)
    # Float64 sums of at most 70 products, then one rounding to float32.
    magnitude = (operands[0].double().abs().sum(1, keepdim=True) + 1) * 16
    assert ((made - wanted).abs() <= wanted.abs() * 2**-24 + magnitude * 2**-44).all()


def test_operator_when_checked_by_torch_then_is_whole():
    operands = (
        torch.randn(2, 3, 64),
        torch.randint(-(2**31), 2**31 - 1, (1, 5, 16), dtype=torch.int32),
        torch.rand(2, 5),
        torch.randint(0, 16, (2, 5), dtype=torch.uint8),
        32,
    )
    named = {"bias": torch.ones(5), "out_dtype": torch.float16}
    torch.library.opcheck(Int4Linear, operands, named)
    assert Int4Linear(*operands, **named).shape == (2, 3, 5)


def test_cost_when_a_weight_is_large_then_is_about_half_a_byte_an_element():
    scale = torch.zeros(64, 4096, dtype=torch.float16)
    weight = torch.zeros(64, 4096, 16, dtype=torch.int32)
    x, out = torch.zeros(0, 8192), torch.zeros(0, 4096)
    found = cost(x, weight, scale, None, out)
    assert found.bytes / (4096 * 8192) == 0.5 + 2 / 128
    assert found.operations == 0
