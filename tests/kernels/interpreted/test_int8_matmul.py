"""int8_matmul in Triton's interpreter, held to its definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.core.errors import InputError
from pt2e_quant.kernels.int8_matmul.batches import read_batches
from pt2e_quant.kernels.int8_matmul.gpu import int8_matmul
from pt2e_quant.kernels.int8_matmul.op import Int8Matmul
from pt2e_quant.kernels.int8_matmul.reference import int8_matmul as reference
from pt2e_quant.kernels.tiles import TileConfig
from tests.kernels.int8_matmul.products import matmul_operands, product_shapes
from tests.kernels.operands import epilogues

SMALL = TileConfig((("BLOCK_M", 16), ("BLOCK_N", 16), ("BLOCK_K", 32)), 4, 2)
# Nothing but exp and erf is rounded otherwise than in the definition.
EXACT = {"none", "relu", "clamp", "leaky_relu", "hardswish"}


@settings(max_examples=15)
@given(st.data(), product_shapes(most=24))
def test_int8_matmul_when_batches_and_strides_are_any_then_equals_the_definition(data, shapes):
    operands = data.draw(matmul_operands(*shapes))
    shape = (*read_batches(*shapes).shape, shapes[0][-2], shapes[1][-1])
    epilogue = data.draw(epilogues(shape))
    made = int8_matmul(*operands, tiles=SMALL, **epilogue)
    wanted = reference(*operands, **epilogue)
    assert made.dtype is wanted.dtype
    assert made.shape == wanted.shape == shape
    if made.dtype is torch.int8:
        bound_lsb = 0 if epilogue["activation"] in EXACT else 1
        assert (made.int() - wanted.int()).abs().max() <= bound_lsb
    elif made.dtype is torch.bfloat16:  # the interpreter truncates to bfloat16
        torch.testing.assert_close(made, wanted, rtol=2**-7, atol=1e-6)
    else:
        rtol = 2**-10 if made.dtype is torch.float16 else 2e-6
        torch.testing.assert_close(made, wanted, rtol=rtol, atol=2e-6)


@pytest.mark.parametrize("M", [1, 33, 200, 260])
def test_int8_matmul_when_tiles_are_the_shipped_ones_then_equals_the_definition(M):
    generator = torch.Generator().manual_seed(0)
    # Heads as a view of what a linear wrote, keys shared by two heads each.
    rows = torch.randint(-128, 128, (1, M, 4, 40), dtype=torch.int8, generator=generator)
    keys = torch.randint(-128, 128, (1, 70, 2, 40), dtype=torch.int8, generator=generator)
    operands = (rows.transpose(1, 2), keys.permute(0, 2, 3, 1), 0.0004, -128, 7)
    end = {"out_dtype": torch.int8, "out_scale": 0.4}
    assert torch.equal(Int8Matmul(*operands, **end), reference(*operands, **end))


@pytest.mark.parametrize("shapes", [((0, 4), (4, 3)), ((2, 0, 3, 4), (2, 0, 4, 3))])
def test_int8_matmul_when_there_is_nothing_then_gives_nothing(shapes):
    left, right = (torch.zeros(shape, dtype=torch.int8) for shape in shapes)
    assert int8_matmul(left, right, 1.0, 0, 0).shape == (*shapes[0][:-1], 3)


def test_int8_matmul_when_a_sum_is_of_nothing_then_gives_zeros():
    left, right = torch.zeros(2, 0, dtype=torch.int8), torch.zeros(0, 3, dtype=torch.int8)
    assert torch.equal(int8_matmul(left, right, 1.0, 5, 5), torch.zeros(2, 3))


def test_int8_matmul_when_dtypes_are_others_then_refuses():
    left, right = torch.zeros(2, 4), torch.zeros(4, 3, dtype=torch.int8)
    with pytest.raises(InputError, match=r"takes left in torch.int8, found torch.float32"):
        int8_matmul(left, right, 1.0, 0, 0)
