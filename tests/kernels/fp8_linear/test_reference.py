"""fp8_linear's definition, held to exact fractions; its operator; cuBLAS's part; where it goes."""

import copy
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.flow.calibrate.sample import sqnr_db
from pt2e_quant.kernels.fp8_linear.gpu import scaled_mm, takes_scaled_mm
from pt2e_quant.kernels.fp8_linear.op import Fp8Linear, cost
from pt2e_quant.kernels.fp8_linear.reference import fp8_linear
from tests.kernels.fp8_operands import fp8_operands
from tests.kernels.grouped_models import fused, quantized


@settings(max_examples=25)
@given(st.data(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 40))
def test_fp8_linear_when_inputs_are_drawn_then_is_the_exact_sum_rounded_step_by_step(data, M, N, K):
    x, x_scale, weight, weight_scale = operands = data.draw(fp8_operands(M, N, K))
    sums = [
        [
            sum(Fraction(a) * Fraction(b) for a, b in zip(row, column, strict=True))
            for column in weight.double().tolist()
        ]
        for row in x.double().tolist()
    ]
    # 40 products of 8 bits each, 36 powers of two apart, are exact in float64.
    exact = torch.tensor([[float(s) for s in row] for row in sums], dtype=torch.float64)
    assert torch.equal(fp8_linear(*operands), exact.float() * weight_scale * x_scale[:, None])


@pytest.mark.parametrize("count", [1, 6])
def test_operator_when_checked_by_torch_then_is_whole(count):
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
        for shape in ((2, 3, 16), (5, 16))
    )
    operands = (x, torch.full((count, 1), 0.5), weight, torch.full((5, 1), 0.25))
    named = {"bias": torch.ones(5), "activation": "relu", "out_dtype": torch.float16}
    # torch's schema check compares arguments, which it cannot in float8.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(Fp8Linear, operands, named, test_utils=checks)
    made = Fp8Linear(*operands, **named)
    wanted = torch.relu(x.float() @ weight.float().t() * 0.125 + 1).half()
    torch.testing.assert_close(made, wanted, rtol=2**-10, atol=1e-6)
    found = cost(x, weight, made)
    assert (found.bytes, found.operations) == (96 + 80 + 60 + 4 * 11, 2 * 6 * 5 * 16)


@pytest.mark.parametrize("per_row", [False, True])
def test_scaled_mm_when_run_by_torch_then_has_the_same_scales_and_layouts(per_row):
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
        for shape in ((2, 40, 32), (48, 32))
    )
    x_scale = torch.rand(80 if per_row else 1, generator=generator)
    weight_scale = torch.rand(48 if per_row else 1, generator=generator)
    made = scaled_mm(x, x_scale, weight, weight_scale, torch.bfloat16)
    wanted = fp8_linear(x, x_scale, weight, weight_scale, out_dtype=torch.bfloat16)
    assert made.shape == (2, 40, 48)
    torch.testing.assert_close(made, wanted, rtol=2**-7, atol=1e-4)


def test_takes_scaled_mm_when_sizes_scales_or_gpus_vary_then_names_what_cublas_takes():
    one, rows = torch.ones(1), torch.ones(80)
    half = torch.bfloat16
    assert takes_scaled_mm(80, 48, 32, one, one, torch.float32, 89)
    assert takes_scaled_mm(80, 48, 32, rows, one, half, 90)
    assert not takes_scaled_mm(80, 48, 32, rows, one, half, 89)
    assert not takes_scaled_mm(80, 48, 32, rows, one, torch.float16, 90)
    assert not takes_scaled_mm(80, 47, 32, one, one, half, 90)
    assert not takes_scaled_mm(80, 48, 30, one, one, half, 90)
    assert not takes_scaled_mm(64, 48, 32, one, one, half, 90)


@pytest.mark.parametrize("name", ["fp8", "fp8_per_tensor", "fp8_dynamic", "fp8_dynamic_per_tensor"])
def test_linears_when_lowered_then_are_one_call_each(name):
    gm, x = quantized(scheme_named(name))
    wanted = copy.deepcopy(gm)(x)
    names, refused = fused(gm)
    assert names.count("fp8_linear") == 2
    assert not any("dequantize" in n for n in names)
    assert refused == {}
    # Sums are exact here and rounded in the q/dq graph, which the second linear may quantize apart.
    assert sqnr_db([wanted], [gm(x)]) > 55
