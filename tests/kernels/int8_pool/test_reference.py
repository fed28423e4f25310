"""int8_pool's definition, held to exact fractions and to torch's pools."""

from fractions import Fraction

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.kernels.int8_pool.op import Int8Pool, cost
from pt2e_quant.kernels.int8_pool.reference import int8_pool
from tests.kernels.int8_pool.pools import pools
from tests.kernels.operands import integers


@settings(max_examples=60)
@given(st.data(), st.integers(-128, 127))
def test_int8_pool_when_inputs_are_drawn_then_equals_torchs_pool_of_the_integers(data, zero_point):
    H, W, (kind, kernel, stride, padding, out, counts, divisor) = data.draw(pools())
    x = data.draw(integers((2, 3, H, W)))
    made = int8_pool(
        x, kind, kernel, stride, padding, out, counts, divisor, x_zero_point=zero_point
    )
    steps = x.double() - zero_point
    if kind == "adaptive":
        wanted = F.adaptive_avg_pool2d(steps, out)
    else:
        ceil = list(F.max_pool2d(steps, kernel, stride, padding).shape[2:]) != out
        wanted = (
            F.max_pool2d(steps, kernel, stride, padding, ceil_mode=ceil)
            if kind == "max"
            else F.avg_pool2d(steps, kernel, stride, padding, ceil, counts, divisor or None)
        )
    torch.testing.assert_close(made.double(), wanted, rtol=1e-7, atol=0.0)


@settings(max_examples=40)
@given(st.data(), st.integers(-128, 127), st.integers(-128, 127))
def test_int8_pool_when_averaging_a_whole_image_then_gives_the_nearest_integer(
    data, zero_point, out_zero_point
):
    x = data.draw(integers((1, 1, 5, 6)))
    made = int8_pool(
        x,
        "adaptive",
        [0, 0],
        [0, 0],
        [0, 0],
        [1, 1],
        x_scale=0.5,
        x_zero_point=zero_point,
        out_dtype=torch.int8,
        out_scale=0.25,
        out_zero_point=out_zero_point,
    )
    exact = Fraction(sum(x.flatten().tolist()) - 30 * zero_point, 30) * 2 + out_zero_point
    nearest = max(-128, min(127, exact))
    # A half of a step, and what float32 rounds.
    assert abs(made.item() - nearest) <= Fraction(1, 2) + Fraction(1, 2**14)


def test_operator_when_checked_by_torch_then_is_whole():
    images = torch.randint(-128, 128, (2, 3, 6, 6), dtype=torch.int8)
    named = {"x_scale": 0.1, "out_dtype": torch.int8, "out_scale": 0.2}
    for x in (images, images.to(memory_format=torch.channels_last)):
        torch.library.opcheck(Int8Pool, (x, "max", [2, 2], [2, 2], [0, 0], [3, 3]), named)
        torch.library.opcheck(Int8Pool, (x, "adaptive", [0, 0], [0, 0], [0, 0], [1, 1]), named)


def test_cost_when_windows_overlap_or_not_then_counts_each_element_of_each_window():
    x, out = torch.zeros(1, 4, 6, 6, dtype=torch.int8), torch.zeros(1, 4, 3, 3, dtype=torch.int8)
    found = cost(x, out, 4)
    assert (found.bytes, found.operations) == (144 + 36, 144)
