"""Few rows times 4-bit weights in torch's own layout for CPUs, held to float64 within the bound."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.core.packing import pack
from pt2e_quant.kernels.int4_linear.few_rows_op import (
    UINT4,
    LinearOfInt4,
    PackInt4,
    PackInt4Codes,
    error_bound,
    scales_and_zeros,
)
from tests.kernels.operands import float_rows, integers

COLUMNS = st.sampled_from([1, 15, 16, 17, 48, 70])


def multiplied(x, codes, scale, zero_point, bias=None):
    G = codes.shape[1] // scale.shape[1]
    both = scales_and_zeros(scale, zero_point)
    return LinearOfInt4(x, PackInt4(pack(codes, UINT4)), G, both, len(codes), bias)


def exact(x, codes, scale, zero_point, bias=None):
    G = codes.shape[1] // scale.shape[1]
    zeros = torch.full_like(scale, 8) if zero_point is None else zero_point
    steps = codes.double() - zeros.double().repeat_interleave(G, 1)
    weight = steps * scale.double().repeat_interleave(G, 1)
    return x.double() @ weight.t() + (0 if bias is None else bias.double())


@settings(max_examples=50)
@given(st.data(), st.integers(1, 6), COLUMNS, st.sampled_from([32, 64, 128, 256]))
def test_product_when_inputs_are_drawn_then_is_within_the_bound(data, M, N, G):
    K = G * data.draw(st.integers(1, max(1, 384 // G)))
    x = data.draw(float_rows((M, K), (torch.float32,)))
    codes = data.draw(integers((N, K), 0, 15, torch.uint8))
    scale = torch.rand(N, K // G) * 0.1 + 1e-3
    scale = scale.to(data.draw(st.sampled_from([torch.float32, torch.bfloat16])))
    zero_point = data.draw(integers((N, K // G), 0, 15, torch.int32))
    operands = x, codes, scale, zero_point if data.draw(st.booleans()) else None
    bias = torch.randn(N) if data.draw(st.booleans()) else None
    error = (multiplied(*operands, bias) - exact(*operands, bias)).abs()
    assert (error <= error_bound(*operands, bias)).all()


@pytest.mark.parametrize(("N", "K", "G"), [(16, 32, 32), (33, 128, 64), (70, 384, 128)])
def test_packed_codes_when_read_through_an_identity_then_come_back(N, K, G):
    """Rows of an identity read each weight: with scales of 1 all is exact."""
    codes = torch.randint(0, 16, (N, K), dtype=torch.uint8)
    read = multiplied(torch.eye(K), codes, torch.ones(N, K // G), None)
    assert torch.equal(read.t() + 8, codes.float())


@pytest.mark.parametrize("shape", [(64,), (2, 2, 64), (0, 64)])
def test_product_when_x_has_any_rank_then_is_that_of_its_rows_in_two_dimensions(shape):
    x, codes = torch.randn(shape), torch.randint(0, 16, (20, 64), dtype=torch.uint8)
    scale = torch.rand(20, 2)
    made = multiplied(x, codes, scale, None)
    expected = multiplied(x.reshape(-1, 64), codes, scale, None)
    assert torch.equal(made, expected.reshape(*shape[:-1], 20))


def test_product_when_activations_are_not_contiguous_then_reads_them_right():
    x, codes = torch.randn(64, 3).t(), torch.randint(0, 16, (16, 64), dtype=torch.uint8)
    scale = torch.rand(16, 2)
    expected = multiplied(x.contiguous(), codes, scale, None)
    assert torch.equal(multiplied(x, codes, scale, None), expected)


def test_product_when_activations_have_another_dtype_then_refuses_it_by_name():
    codes = torch.zeros(16, 64, dtype=torch.uint8)
    with pytest.raises(UnsupportedError, match=r"float32 activations, found torch\.float16"):
        multiplied(torch.zeros(2, 64).half(), codes, torch.ones(16, 2), None)


def test_operator_when_run_on_fake_tensors_then_has_the_results_shape_and_dtype():
    with FakeTensorMode():
        packed = PackInt4(torch.empty(20, 32, dtype=torch.uint8))
        both = scales_and_zeros(torch.empty(20, 2), None)
        made = LinearOfInt4(torch.empty(2, 1, 64), packed, 32, both, 20, torch.empty(20))
    assert (made.shape, made.dtype) == ((2, 1, 20), torch.float32)


@settings(max_examples=10, deadline=None)
@given(data=st.data(), columns=COLUMNS, depth=st.sampled_from([32, 96]))
def test_pack_codes_when_not_in_pairs_then_as_those_in_pairs(data, columns, depth):
    codes = data.draw(integers((columns, depth), 0, 15, torch.uint8))
    found = PackInt4Codes(codes)
    assert torch.equal(found, PackInt4(pack(codes, UINT4)))
    with FakeTensorMode():
        fake = PackInt4Codes(torch.empty(columns, depth, dtype=torch.uint8))
    assert (fake.shape, fake.dtype) == (found.shape, found.dtype)
