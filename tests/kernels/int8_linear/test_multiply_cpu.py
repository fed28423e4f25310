"""int8_linear's implementations on CPUs, held to the definition to the last bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from pt2e_quant.kernels.int8_linear import multiply_cpu, rows_op
from pt2e_quant.kernels.int8_linear.multiply_cpu import int8_linear as multiplied
from pt2e_quant.kernels.int8_linear.reference import int8_linear as defined
from pt2e_quant.kernels.int8_linear.rows_op import (
    Int8LinearRows,
    linear_of_quantized_rows,
    sums_fit_float,
)
from pt2e_quant.kernels.onednn.exact_products import onednn_is_exact
from pt2e_quant.kernels.onednn.operators import PackLinear
from pt2e_quant.kernels.quantize_per_token.op import QuantizeRows
from tests.kernels.operands import epilogues, linear_operands

SIZES = st.sampled_from([1, 2, 7, 16, 33])
needs_vnni = pytest.mark.skipif(not onednn_is_exact(), reason="oneDNN saturates here")


def rows(x, x_scale, x_zero_point, weight, weight_scale, weight_sum, **named):
    packed = PackLinear(weight, None)
    return Int8LinearRows(
        x, x_scale, x_zero_point, packed, weight_scale, weight_sum.float(), **named
    )


def equal(a, b):
    return a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())


@needs_vnni
@settings(max_examples=60)
@given(st.data(), SIZES, SIZES, st.sampled_from([1, 3, 64, 129, 514]), st.booleans())
def test_implementations_when_inputs_are_drawn_then_equal_the_definition_to_the_last_bit(
    data, M, N, K, per_row
):
    operands = data.draw(linear_operands(M, N, K, per_row=per_row))
    named = data.draw(epilogues((M, N)))
    expected = defined(*operands, **named)
    assert equal(multiplied(*operands, **named), expected)
    assert sums_fit_float(operands[3])
    assert equal(rows(*operands, **named), expected)
    assert equal(multiply_cpu.written_out(*operands, **named), expected)
    *ahead, weight, weight_scale, weight_sum = operands
    packed = PackLinear(weight, None), weight_scale, weight_sum.float()
    assert equal(Int8LinearRows(*ahead, *packed[:2], None, **named), expected)
    assert equal(rows_op.written_out(*ahead, *packed, **named), expected)


@needs_vnni
@pytest.mark.parametrize("shape", [(64,), (1, 64), (1, 1, 64), (5, 64), (0, 64)], ids=str)
@pytest.mark.parametrize("kind", ["normal", "positive", "zero", "infinite"])
def test_float_rows_when_multiplied_at_once_then_equal_to_both_operators(shape, kind):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * 7
    x = {"normal": x, "positive": x.abs() + 3, "zero": 0 * x, "infinite": x / 0.0}[kind]
    weight = torch.randint(-127, 128, (5, 64), generator=generator).to(torch.int8)
    packed, scale = PackLinear(weight, None), torch.rand(5, generator=generator)
    for bias in (None, torch.randn(5, generator=generator)):
        expected = Int8LinearRows(*QuantizeRows(x), packed, scale, None, bias=bias)
        assert equal(linear_of_quantized_rows(x, packed, scale, bias), expected)


@needs_vnni
@pytest.mark.parametrize("K", [768, 4096])
def test_rows_when_their_sums_fit_float32_then_long_ones_are_exact(K):
    generator = torch.Generator().manual_seed(K)
    x = torch.randint(-128, 128, (19, K), dtype=torch.int8, generator=generator)
    weight = torch.randn(40, K, generator=generator).mul(30).clamp(-127, 127).to(torch.int8)
    zero_point = torch.randint(-128, 128, (19,), dtype=torch.int32, generator=generator)
    scale = torch.rand(19, generator=generator)
    operands = (
        x,
        scale,
        zero_point,
        weight,
        torch.rand(40, generator=generator),
        weight.sum(1, dtype=torch.int32),
    )
    assert sums_fit_float(weight)
    assert torch.equal(rows(*operands), defined(*operands))


def test_sums_fit_float_when_sums_grow_then_is_false_beyond_float32s_integers():
    assert sums_fit_float(torch.full((2, 518), 127, dtype=torch.int8))
    assert not sums_fit_float(torch.full((2, 519), 127, dtype=torch.int8))
    assert not sums_fit_float(torch.full((2, 519), -127, dtype=torch.int8))
    assert sums_fit_float(torch.tensor([127, -127] * 500, dtype=torch.int8).reshape(1, -1))


@needs_vnni
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)])
def test_implementations_when_there_are_no_rows_then_give_no_rows(shape):
    weight = torch.ones(5, 8, dtype=torch.int8)
    zero = torch.zeros(0, 1, dtype=torch.int32)
    operands = (
        torch.zeros(shape, dtype=torch.int8),
        torch.zeros(0, 1),
        zero,
        weight,
        torch.ones(5),
        weight.sum(1, dtype=torch.int32),
    )
    for made in (multiplied(*operands), rows(*operands)):
        assert made.shape == (*shape[:-1], 5)


def test_multiply_when_integer_products_saturate_then_runs_the_definition(monkeypatch):
    x = torch.full((2, 8), -128, dtype=torch.int8)
    weight = torch.full((3, 8), -127, dtype=torch.int8)
    operands = (
        x,
        torch.ones(1),
        torch.zeros(1, dtype=torch.int32),
        weight,
        torch.ones(3),
        weight.sum(1, dtype=torch.int32),
    )
    monkeypatch.setattr(multiply_cpu, "int_mm_is_exact", lambda: False)
    monkeypatch.setattr(torch, "_int_mm", None)
    assert multiplied(*operands).tolist() == [[128.0 * 127 * 8] * 3] * 2


def test_operator_when_run_on_fake_tensors_then_has_the_results_shape_and_dtype():
    with FakeTensorMode():
        weight = PackLinear(torch.empty(5, 8, dtype=torch.int8), None)
        made = Int8LinearRows(
            torch.empty(2, 3, 8, dtype=torch.int8),
            torch.empty(6, 1),
            torch.empty(6, 1, dtype=torch.int32),
            weight,
            torch.empty(5),
            torch.empty(5),
            out_dtype=torch.float16,
        )
    assert (made.shape, made.dtype) == ((2, 3, 5), torch.float16)
