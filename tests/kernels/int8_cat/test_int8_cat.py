"""int8_cat's definition, its operator, and where a cat between q/dq becomes one call."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.kernels.int8_cat.op import KERNELS, Int8Cat, cost
from pt2e_quant.kernels.int8_cat.reference import int8_cat
from tests.kernels.lowering import calls_of, captured, fuse, qdq
from tests.kernels.operands import integers

STEP = st.sampled_from([0.0037, 0.02, 0.3])
ZERO = st.integers(-128, 127)


@settings(max_examples=50)
@given(st.data(), STEP, STEP, ZERO, ZERO)
def test_int8_cat_when_inputs_are_drawn_then_equals_numpys_float32(
    data, scale, out_scale, zero_point, out_zero_point
):
    x, y = data.draw(integers((3, 7))), data.draw(integers((3, 5)))
    named = {"out_dtype": torch.int8, "out_scale": out_scale, "out_zero_point": out_zero_point}
    made = int8_cat([x, y], 1, [scale, out_scale], [zero_point, out_zero_point], **named)
    real = (x.numpy().astype(np.float32) - np.float32(zero_point)) * np.float32(scale)
    steps = np.rint(real * np.float32(1.0 / out_scale)) + out_zero_point
    assert made[:, :7].tolist() == np.clip(steps, -128, 127).astype(int).tolist()
    # With the result's own qparams the integers stay.
    assert torch.equal(made[:, 7:], y)


def test_operator_when_checked_by_torch_then_is_whole():
    x = torch.randint(-128, 128, (2, 3, 4, 5), dtype=torch.int8)
    named = {"out_dtype": torch.int8, "out_scale": 0.2}
    for y in (x, x.to(memory_format=torch.channels_last)):
        torch.library.opcheck(Int8Cat, ([y, x, y], 1, [0.1, 0.2, 0.3], [0, 1, 2]), named)
    with pytest.raises(ConfigError, match="found 0 tensors"):
        int8_cat([], 0, [], [])


def test_cost_when_counted_then_has_each_tensor_once():
    x = torch.zeros(2, 3, dtype=torch.int8)
    assert cost([x, x], torch.zeros(2, 6, dtype=torch.int8)).bytes == 24


class Joined(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.run = run

    def forward(self, x):
        return self.run(x)


@pytest.mark.parametrize(
    ("run", "count"),
    [
        (lambda x: qdq(torch.cat([qdq(x, 0.02), qdq(x + 1, 0.03, 5)], 1), 0.03, -9), 1),
        (lambda x: torch.cat([qdq(x, 0.02), qdq(x + 1, 0.03, 5)], -1), 1),
        (lambda x: torch.cat([qdq(x, 0.02), x], 1), 0),
    ],
)
def test_cat_when_its_inputs_are_integers_then_is_one_call_and_equal(run, count):
    x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    gm = captured(Joined(run), x)
    wanted = gm(x)
    fuse(gm, KERNELS)
    assert calls_of(gm) == ["int8_cat"] * count
    assert torch.equal(gm(x), wanted)
