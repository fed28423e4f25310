"""int8_linear's definition, held to Python's integers, and its operator."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.kernels.int8_linear.op import Int8Linear, cost
from pt2e_quant.kernels.int8_linear.reference import int8_linear
from tests.kernels.operands import linear_operands


def by_hand(operands, out_scale, out_zero_point):
    """Sums in Python's integers; each float step rounded by numpy to float32."""
    x, x_scale, x_zero, weight, weight_scale, _ = (t.tolist() for t in operands)
    rows = []
    for m, row in enumerate(x):
        at = m if len(x_scale) > 1 else 0
        made = []
        for n, column in enumerate(weight):
            total = sum((a - x_zero[at]) * b for a, b in zip(row, column, strict=True))
            scale = np.float32(x_scale[at]) * np.float32(weight_scale[n])
            step = np.rint(np.float32(total) * scale * np.float32(1.0 / out_scale))
            made.append(int(np.clip(step + out_zero_point, -128, 127)))
        rows.append(made)
    return torch.tensor(rows, dtype=torch.int8)


@settings(max_examples=60)
@given(
    st.data(),
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(1, 70),
    st.booleans(),
    st.sampled_from([0.002, 0.7, 40.0]),
    st.integers(-128, 127),
)
def test_int8_linear_when_inputs_are_drawn_then_equals_pythons_integers(
    data, M, N, K, per_row, out_scale, out_zero_point
):
    operands = data.draw(linear_operands(M, N, K, per_row=per_row))
    made = int8_linear(
        *operands, out_dtype=torch.int8, out_scale=out_scale, out_zero_point=out_zero_point
    )
    assert made.tolist() == by_hand(operands, out_scale, out_zero_point).tolist()


def test_operator_when_checked_by_torch_then_is_whole():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-127, 128, (5, 8), dtype=torch.int8, generator=generator)
    operands = (
        torch.randint(-128, 128, (2, 3, 8), dtype=torch.int8, generator=generator),
        torch.rand(1, generator=generator),
        torch.tensor([4], dtype=torch.int32),
        weight,
        torch.rand(5, generator=generator),
        weight.sum(1, dtype=torch.int32),
    )
    named = {"bias": torch.ones(5), "out_dtype": torch.float16}
    torch.library.opcheck(Int8Linear, operands, named)
    assert Int8Linear(*operands, **named).shape == (2, 3, 5)


def test_cost_when_counted_then_has_each_tensor_once():
    x, weight = torch.zeros(2, 8, dtype=torch.int8), torch.zeros(5, 8, dtype=torch.int8)
    found = cost(x, weight, torch.zeros(2, 5))
    assert (found.bytes, found.operations) == (16 + 40 + 40 + 40, 160)
