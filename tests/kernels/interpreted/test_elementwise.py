"""quantize and int8_add in Triton's interpreter, held to their definitions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.core.errors import ConfigError, InputError
from pt2e_quant.kernels.int8_add.gpu import int8_add
from pt2e_quant.kernels.int8_add.op import Int8Add
from pt2e_quant.kernels.int8_add.reference import int8_add as add_reference
from pt2e_quant.kernels.quantize.gpu import quantize
from pt2e_quant.kernels.quantize.op import Quantize
from pt2e_quant.kernels.quantize.reference import quantize as quantize_reference
from pt2e_quant.kernels.tiles import TileConfig
from tests.kernels.operands import EXACT_ACTIVATIONS, float_rows, integers, outputs

SMALL = TileConfig((("BLOCK", 64),), num_warps=4, num_stages=1)


def assert_near(made, wanted, activation):
    assert made.dtype is wanted.dtype
    assert made.stride() == wanted.stride()
    if not made.is_floating_point():
        bound_lsb = 0 if activation in EXACT_ACTIVATIONS else 1
        assert (made.int() - wanted.int()).abs().max() <= bound_lsb
        return
    # The interpreter truncates to bfloat16.
    rtol = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}[made.dtype]
    torch.testing.assert_close(made, wanted, rtol=rtol, atol=2e-6)


@st.composite
def operands(draw, shape, name):
    """A tensor of a shape with its qparams, or floats."""
    if draw(st.booleans()):
        return draw(float_rows(shape)), {}
    low, dtype = draw(st.sampled_from([(-128, torch.int8), (0, torch.uint8)]))
    x = draw(integers(shape, low=low, high=low + 255, dtype=dtype))
    scale = draw(st.sampled_from([0.004, 0.37]))
    return x, {f"{name}_scale": scale, f"{name}_zero_point": draw(st.integers(low, low + 255))}


@settings(max_examples=60)
@given(st.data(), st.integers(1, 200))
def test_quantize_when_inputs_are_drawn_then_equals_the_definition(data, size):
    x, qparams = data.draw(operands((size,), "x"))
    output = data.draw(outputs())
    made = quantize(x, tiles=SMALL, **qparams, **output)
    assert_near(made, quantize_reference(x, **qparams, **output), output["activation"])


SHAPES = [
    ((3, 5, 7), (3, 5, 7)),
    ((3, 5, 7), (5, 7)),
    ((3, 5, 7), (3, 5, 1)),
    ((3, 5, 7), (3, 1, 7)),
    ((3, 1, 7), (3, 5, 7)),
    ((2, 3, 4, 5), (2, 3, 1, 1)),
    ((2, 1, 4, 1), (3, 1, 5)),
    ((6,), ()),
]


@settings(max_examples=80)
@given(
    st.data(),
    st.sampled_from(SHAPES),
    st.sampled_from(["add", "sub", "mul"]),
    st.booleans(),
    st.booleans(),
)
def test_int8_add_when_inputs_are_drawn_then_equals_the_definition(
    data, shapes, combine, x_reversed, y_reversed
):
    x, x_qparams = data.draw(operands(shapes[0], "x"))
    y, y_qparams = data.draw(operands(shapes[1], "y"))
    if x_reversed and x.dim() == 4:
        x = x.to(memory_format=torch.channels_last)
    if y_reversed and y.dim() == 4:
        y = y.to(memory_format=torch.channels_last)
    named = {"combine": combine, **x_qparams, **y_qparams, **data.draw(outputs())}
    made = int8_add(x, y, tiles=SMALL, **named)
    assert_near(made, add_reference(x, y, **named), named["activation"])


def test_elementwise_when_tiles_are_the_shipped_ones_then_equals_the_definition_in_any_layout():
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-128, 128, (2, 8, 130, 140), dtype=torch.int8, generator=generator)
    end = {"out_dtype": torch.int8, "out_scale": 0.1, "out_zero_point": 3}
    for y in (x.to(memory_format=torch.channels_last), x[:, :, ::2].repeat(1, 1, 2, 1), x[:1]):
        named = {"x_scale": 0.02, "y_scale": 0.03, "y_zero_point": -7, **end}
        assert torch.equal(Int8Add(x, y, **named), add_reference(x, y, **named))
    strided = x[:, :, :, ::3]
    wanted = quantize_reference(strided, x_scale=0.02, **end)
    assert torch.equal(Quantize(strided, x_scale=0.02, **end), wanted)


def test_elementwise_when_given_what_it_cannot_read_then_refuses():
    with pytest.raises(InputError, match=r"takes x in .*, found torch.int32"):
        quantize(torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ConfigError, match='add, sub, mul, found "div"'):
        int8_add(torch.zeros(2), torch.zeros(2), combine="div")


def test_elementwise_when_there_is_nothing_then_gives_nothing():
    assert quantize(torch.zeros(0, 3)).shape == (0, 3)
    assert int8_add(torch.zeros(0, 3), torch.zeros(3)).shape == (0, 3)
