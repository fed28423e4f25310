"""int8_add's definition, held to numpy's float32 and to the integer definition of an add."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.core.integer_ops.calls import compute
from pt2e_quant.core.integer_ops.requantize import OutputRange
from pt2e_quant.core.integer_ops.sums import add, common_shift
from pt2e_quant.kernels.int8_add.op import Int8Add, cost
from pt2e_quant.kernels.int8_add.reference import int8_add
from tests.kernels.operands import integers

STEP = st.sampled_from([0.0037, 0.02, 0.3])
ZERO = st.integers(-128, 127)


@settings(max_examples=80)
@given(st.data(), STEP, STEP, STEP, ZERO, ZERO, ZERO, st.sampled_from(["add", "sub", "mul"]))
def test_int8_add_when_inputs_are_drawn_then_equals_numpys_float32(
    data, xs, ys, out_scale, xz, yz, oz, combine
):
    x, y = data.draw(integers((40,))), data.draw(integers((40,)))
    made = int8_add(
        x,
        y,
        combine=combine,
        x_scale=xs,
        x_zero_point=xz,
        y_scale=ys,
        y_zero_point=yz,
        out_dtype=torch.int8,
        out_scale=out_scale,
        out_zero_point=oz,
    )
    left = (x.numpy().astype(np.float32) - np.float32(xz)) * np.float32(xs)
    right = (y.numpy().astype(np.float32) - np.float32(yz)) * np.float32(ys)
    real = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[combine](left, right)
    steps = np.rint(real * np.float32(1.0 / out_scale)) + oz
    assert made.tolist() == np.clip(steps, -128, 127).astype(int).tolist()


@settings(max_examples=40)
@given(st.data(), STEP, STEP, STEP, ZERO, ZERO)
def test_int8_add_when_inputs_are_drawn_then_is_within_a_step_of_the_integer_definition(
    data, xs, ys, out_scale, xz, yz
):
    x, y = data.draw(integers((40,))), data.draw(integers((40,)))
    factors = common_shift(xs / out_scale, ys / out_scale)
    assert factors is not None
    whole = add(
        compute,
        x,
        y,
        factors,
        OutputRange(zero_point=0, low=-128, high=127, storage=torch.int8),
        zero_points=(xz, yz),
        storages=(torch.int8, torch.int8),
    )
    made = int8_add(
        x,
        y,
        x_scale=xs,
        x_zero_point=xz,
        y_scale=ys,
        y_zero_point=yz,
        out_dtype=torch.int8,
        out_scale=out_scale,
    )
    assert (made.int() - whole.int()).abs().max() <= 1


def test_operator_when_checked_by_torch_then_is_whole():
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-128, 128, (2, 3, 4, 5), dtype=torch.int8, generator=generator)
    named = {"combine": "mul", "out_dtype": torch.int8, "out_scale": 0.1}
    for y in (x.to(memory_format=torch.channels_last), torch.randn(3, 1, 1), torch.randn(5)):
        torch.library.opcheck(Int8Add, (x, y), named)
        torch.library.opcheck(Int8Add, (y, x), named)
    assert Int8Add(x[:, :1], torch.randn(3, 1, 5), **named).shape == (2, 3, 4, 5)


def test_cost_when_counted_then_has_each_tensor_once():
    x, y = torch.zeros(4, 5, dtype=torch.int8), torch.zeros(5)
    assert cost(x, y, x).bytes == 20 + 20 + 20
