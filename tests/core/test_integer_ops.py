"""Definitions in integers, run on tensors, against oracles that compute in another way."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.core.integer import Multiplier, Rounding, requantize_fixed, shift_right
from pt2e_quant.core.integer_ops.calls import compute, widen
from pt2e_quant.core.integer_ops.products import Quotient, Window, convolve, multiply_rows
from pt2e_quant.core.integer_ops.profiles import PROFILES, Requantization
from pt2e_quant.core.integer_ops.quantize import dequantize, quantize
from pt2e_quant.core.integer_ops.requantize import (
    Factor,
    OutputRange,
    factor_of,
    output_range,
    requantize,
)
from pt2e_quant.core.integer_ops.sums import (
    add,
    add_by_ratios,
    add_up,
    common_shift,
    reciprocal_of,
)
from pt2e_quant.core.qparams import QParams

LIBRARY = torch.ops.quantized_decomposed
LIMITS = {torch.int8: (-128, 127), torch.uint8: (0, 255), torch.int16: (-32768, 32767)}
STORAGES = st.sampled_from(list(LIMITS))
SCALES = st.floats(1e-6, 1e3).map(np.float32).map(float)
SEEDS = st.integers(0, 2**31 - 1)


def integers(seed, shape, dtype):
    low, high = LIMITS[dtype]
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(low, high + 1, shape, generator=generator)
    values.view(-1)[:2] = torch.tensor([low, high])[: values.numel()]
    return values.to(dtype)


def zero_point(draw, dtype):
    return draw(st.integers(*LIMITS[dtype]))


@settings(max_examples=50)
@given(st.data(), STORAGES, SEEDS)
def test_widen_when_the_difference_is_extreme_then_it_never_overflows(data, dtype, seed):
    x, zero = integers(seed, (7,), dtype), zero_point(data.draw, dtype)
    assert torch.equal(widen(compute, x, zero, dtype).long(), x.long() - zero)


@settings(max_examples=50)
@given(st.data(), STORAGES, SCALES, SEEDS)
def test_requantize_when_any_int32_then_rounded_where_stated(data, dtype, factor, seed):
    low, high = LIMITS[dtype]
    low = data.draw(st.integers(low, high))
    out = OutputRange(zero_point=zero_point(data.draw, dtype), low=low, high=high, storage=dtype)
    generator = torch.Generator().manual_seed(seed)
    accumulator = torch.randint(-(2**31), 2**31, (64,), generator=generator).to(torch.int32)
    near = torch.arange(-6, 6, dtype=torch.int32)  # ties where the factor is a half
    accumulator = torch.cat([accumulator, near])
    for scale in (torch.tensor(factor), torch.tensor(0.5), torch.tensor(3e38)):
        expected = [_requantized(v, float(scale), out) for v in accumulator.tolist()]
        for value in (scale, float(scale)):
            factor = Factor(kind=Requantization.FLOAT32, values=(value,))
            assert requantize(compute, accumulator, factor, out).tolist() == expected


def test_factor_when_made_then_multiplied_before_divided():
    scales = [torch.tensor([v]) for v in (0.1, 0.3)]
    (found,) = factor_of(Requantization.FLOAT32, scales, torch.tensor([0.7])).values
    assert found.item() == np.float32(
        np.float32(np.float32(0.1) * np.float32(0.3)) / np.float32(0.7)
    )
    product, inverse = factor_of(Requantization.TWO_FACTORS, scales, torch.tensor([0.7])).values
    assert product.item() == np.float32(np.float32(0.1) * np.float32(0.3))
    assert inverse.item() == np.float32(1.0) / np.float32(0.7)
    value, shift = factor_of(Requantization.SINGLE, scales, torch.tensor([0.7]), divisor=49).values
    real = float(np.float32(0.1)) * float(np.float32(0.3)) / (float(np.float32(0.7)) * 49)
    assert abs(int(value) / 2 ** int(shift) - real) <= real * 2**-31


@settings(max_examples=50)
@given(st.data(), SCALES, SEEDS)
def test_requantize_by_two_factors_when_any_int32_then_onednn_s_order(data, scale, seed):
    low, high = LIMITS[torch.int8]
    zero = zero_point(data.draw, torch.int8)
    out = OutputRange(zero_point=zero, low=low, high=high, storage=torch.int8)
    generator = torch.Generator().manual_seed(seed)
    total = torch.randint(-(2**20), 2**20, (64,), generator=generator).to(torch.int32)
    first, second = np.float32(scale), np.float32(1.0) / np.float32(0.3)
    kind = Requantization.TWO_FACTORS
    factor = Factor(kind=kind, values=(float(first), float(second)))
    expected = []
    for value in total.tolist():
        real = np.float32(np.float32(np.float32(value) * first) * second)
        real = np.float32(real + np.float32(zero))
        expected.append(min(max(int(np.rint(np.clip(real, -1e9, 1e9))), low), high))
    assert requantize(compute, total, factor, out).tolist() == expected


@pytest.mark.parametrize("kind", [kind for kind in Requantization if kind.is_fixed])
def test_requantize_by_multiplier_when_any_int32_then_the_definition(kind):
    total = torch.arange(-1000, 1000, 7, dtype=torch.int32).reshape(2, -1)
    scales = [torch.tensor([0.02]), torch.tensor([0.5, 0.01])[:, None]]
    factor = factor_of(kind, scales, torch.tensor([0.04]))
    out = OutputRange(zero_point=3, low=-128, high=127, storage=torch.int8)
    found = requantize(compute, total, factor, out)
    multiplier = Multiplier(value=factor.values[0], shift=factor.values[1])
    limits = {"zero_point": 3, "quant_min": -128, "quant_max": 127}
    assert found.dtype is torch.int8
    assert torch.equal(found.long(), requantize_fixed(total, multiplier, kind=kind, **limits))


def _requantized(value: int, factor: float, out: OutputRange) -> int:
    """One accumulator in Python's own numbers, saturated after the zero_point is added."""
    with np.errstate(over="ignore"):
        # Both are exact in float64 before the one rounding to float32.
        product = float(np.float32(float(np.float32(float(value))) * float(np.float32(factor))))
    if math.isinf(product):
        return out.high if product > 0 else out.low
    return min(max(round(Fraction(product)) + out.zero_point, out.low), out.high)


@pytest.mark.parametrize("bounds", [(0.0, None), (0.0, 6.0), (-1.0, 1.0), (None, None), (0, 1e30)])
@settings(max_examples=50)
@given(st.data(), SCALES)
def test_output_range_when_bounds_are_given_then_they_are_quantized(bounds, data, scale):
    zero = zero_point(data.draw, torch.int8)
    qp = QParams.per_tensor(scale, zero, -128, 127, torch.int8)
    out = output_range(qp, torch.int8, bounds)
    x = torch.tensor([-1e4, -6.0, -1.0, -0.3, 0.0, 0.2, 1.0, 5.9, 6.0, 7.0, 1e4]) * 1.0
    clamped = x if bounds == (None, None) else x.clamp(*bounds)
    arguments = (scale, zero, -128, 127, torch.int8)
    expected = LIBRARY.quantize_per_tensor(clamped, *arguments)
    found = LIBRARY.quantize_per_tensor(x, *arguments).clamp(out.low, out.high)
    assert torch.equal(found, expected)


@settings(max_examples=50)
@given(st.data(), STORAGES, SEEDS)
def test_multiply_rows_when_values_are_random_then_the_sum_of_products(data, dtype, seed):
    rows, inner, out = (data.draw(st.integers(1, 5)) for _ in range(3))
    x, w = integers(seed, (2, rows, inner), dtype), integers(seed + 1, (out, inner), torch.int8)
    zero = zero_point(data.draw, dtype)
    w_zero = torch.tensor([zero_point(data.draw, torch.int8) for _ in range(out)])[:, None]
    bias = torch.randint(-1000, 1000, (out,), dtype=torch.int32)
    found = multiply_rows(
        compute, x, w, bias, x_zero_point=zero, weight_zero_point=w_zero,
        x_storage=dtype, weight_storage=torch.int8,
    )  # fmt: skip
    assert found.dtype == torch.int32
    expected = (x.long() - zero) @ (w.long() - w_zero).t() + bias
    assert torch.equal(found.long(), expected)


@settings(max_examples=50)
@given(st.data(), SEEDS)
def test_convolve_when_padded_then_zeros_stand_around_the_differences(data, seed):
    rank = data.draw(st.integers(1, 3))
    groups, per = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    kernel = [data.draw(st.integers(1, 3)) for _ in range(rank)]
    window = Window(
        stride=[data.draw(st.integers(1, 2)) for _ in range(rank)],
        padding=[data.draw(st.integers(0, 2)) for _ in range(rank)],
        dilation=[data.draw(st.integers(1, 2)) for _ in range(rank)],
        groups=groups,
    )
    size = [5 + data.draw(st.integers(0, 2)) for _ in range(rank)]
    x = integers(seed, (2, groups * per, *size), torch.uint8)
    w = integers(seed + 1, (groups * 2, per, *kernel), torch.int8)
    zero = zero_point(data.draw, torch.uint8)
    bias = torch.arange(groups * 2, dtype=torch.int32).reshape(-1, *[1] * rank)
    found = convolve(
        compute, x, w, bias, window, x_zero_point=zero, weight_zero_point=3,
        x_storage=torch.uint8, weight_storage=torch.int8,
    )  # fmt: skip
    # float64 holds these sums exactly
    expected = torch.ops.aten.convolution(
        x.double() - zero, w.double() - 3, None, window.stride, window.padding, window.dilation,
        False, [0] * rank, groups,
    ) + bias  # fmt: skip
    assert found.dtype == torch.int32
    assert torch.equal(found.double(), expected)


@settings(max_examples=50)
@given(st.data(), st.sampled_from([torch.int8, torch.uint8, torch.int16]), SEEDS)
def test_add_when_scales_differ_then_the_exact_sum_is_rounded_once(data, dtype, seed):
    first, second = data.draw(SCALES), data.draw(SCALES)
    factors = common_shift(first, second)
    x, y = integers(seed, (3, 4), dtype), integers(seed + 1, (4,), dtype)
    zeros = zero_point(data.draw, dtype), zero_point(data.draw, dtype)
    low, high = LIMITS[dtype]
    out = OutputRange(zero_point=zero_point(data.draw, dtype), low=low, high=high, storage=dtype)
    found = add(compute, x, y, factors, out, zero_points=zeros, storages=(dtype, dtype))
    a, b = x.long() - zeros[0], y.long() - zeros[1]
    total = a * factors.first + b * factors.second
    exact = shift_right(total, factors.shift, Rounding.HALF_UP) + out.zero_point
    assert torch.equal(found.long(), exact.clamp(low, high))
    # the multipliers are the factors to 31 bits, or to 2 ** -61
    real = a.double() * first + b.double() * second + out.zero_point
    bound = 0.5 + 2.0**-29 * float(real.abs().max() + 1) + 2.0**-40
    assert float((exact - real).abs().max()) <= bound


def test_common_shift_when_there_is_none_then_declined():
    assert common_shift(2.0**31, 1.0) is None
    assert common_shift(float("inf"), 1.0) is None
    assert common_shift(1e-30, 1e-30).shift == 61


@settings(max_examples=50)
@given(st.data(), STORAGES, SEEDS, st.booleans())
def test_add_up_when_there_is_a_zero_point_then_the_sum_of_differences(data, dtype, seed, keepdim):
    x, zero = integers(seed, (2, 3, 4, 5), dtype), zero_point(data.draw, dtype)
    found = add_up(compute, x, [-2, 3], keepdim=keepdim, zero_point=zero, storage=dtype)
    assert found.dtype == torch.int32
    assert torch.equal(found.long(), (x.long() - zero).sum([-2, -1], keepdim=keepdim))


@settings(max_examples=50)
@given(st.data(), STORAGES, SEEDS, st.integers(1, 2**31 - 1), st.integers(1, 61))
def test_quotient_when_computed_then_the_fraction_rounded_once(
    data, dtype, seed, multiplier, shift
):
    zero = zero_point(data.draw, torch.int8)
    x, y = integers(seed, (40,), dtype), integers(seed + 1, (40,), torch.int8)
    left, right = x.int() - 3, y.short() * data.draw(st.sampled_from([0, 1, 257]))
    found = Quotient(left, right, multiplier, shift, zero, -128, 127, torch.int8)
    for a, b, made in zip(left.tolist(), right.tolist(), found.tolist(), strict=True):
        if b == 0:
            expected = zero if a == 0 else 127 if a > 0 else -128
        else:
            expected = math.floor(Fraction(a * multiplier, b << shift) + Fraction(1, 2)) + zero
        assert made == min(max(expected, -128), 127)


@settings(max_examples=50)
@given(st.data(), STORAGES, SCALES, SEEDS)
def test_quantize_and_dequantize_when_run_then_the_operators_to_the_last_bit(
    data, dtype, scale, seed
):
    low, high = LIMITS[dtype]
    zero = zero_point(data.draw, dtype)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, generator=generator) * scale * data.draw(st.sampled_from([1.0, 50.0, 1e6]))
    x = torch.cat([x, torch.tensor([0.0, 0.5, -0.5, 1.5]) * scale])
    expected = LIBRARY.quantize_per_tensor(x, scale, zero, low, high, dtype)
    found = quantize(compute, x, 1.0 / scale, zero, limits=(low, high), storage=dtype)
    assert torch.equal(found, expected)
    for out_dtype in (torch.float32, torch.bfloat16):
        arguments = (scale, zero, low, high, dtype)
        real = LIBRARY.dequantize_per_tensor(expected, *arguments, out_dtype=out_dtype)
        assert torch.equal(dequantize(compute, found, scale, zero, dtype=out_dtype), real)


# Transcriptions of the runtimes' sources on 100,000 cases each.

CASES = 100_000
OUT = OutputRange(zero_point=-11, low=-128, high=127, storage=torch.int8)


def accumulators(seed):
    """Integers of all sizes, as int32."""
    generator = np.random.default_rng(seed)
    return (generator.integers(-(2**31), 2**31, CASES) >> generator.integers(0, 31, CASES)).astype(
        np.int32
    )


def by_lrintf(total, scale):
    """XNNPACK, xnn_qs8_requantize_fp32__scalar_lrintf; MLAS, MlasRequantizeOutput, is alike."""
    low, high = (np.float32(v - OUT.zero_point) for v in (OUT.low, OUT.high))
    scaled = np.clip(total.astype(np.float32) * scale, low, high)
    return np.rint(scaled).astype(np.int32) + OUT.zero_point


def by_magic_bias(total, scale):
    """XNNPACK, xnn_qs8_requantize_fp32__scalar_fmagic: rounds in the last bit of a float32."""
    low, high = (np.float32(v - OUT.zero_point) for v in (OUT.low, OUT.high))
    scaled = np.clip(total.astype(np.float32) * scale, low, high)
    return (scaled + np.float32(12582912.0)).view(np.int32) - (0x4B400000 - OUT.zero_point)


@pytest.mark.parametrize("rule", [by_lrintf, by_magic_bias])
@pytest.mark.parametrize("scale", [2.0**-9, 0.5, 0.037, 3.3e-6])
def test_requantize_when_100_000_cases_then_as_xnnpack_and_mlas(rule, scale):
    total, scale = accumulators(0), np.float32(scale)
    factor = Factor(kind=Requantization.FLOAT32, values=(float(scale),))
    found = requantize(compute, torch.from_numpy(total), factor, OUT)
    assert np.array_equal(found.numpy(), rule(total, scale).astype(np.int8))


def integers_and_zeros(seed):
    generator = np.random.default_rng(seed)
    values = generator.integers(-128, 128, (2, CASES)).astype(np.int8)
    return values, generator.integers(-128, 128, 2).tolist()


@pytest.mark.parametrize("ratios", [(0.7, 0.31), (0.25, 0.5), (1.9, 0.002)])
def test_add_when_100_000_cases_then_as_xnnpack(ratios):
    (x, y), zeros = integers_and_zeros(1)
    first, second = (np.float32(r) for r in ratios)
    # xnn_init_qs8_add_minmax_scalar_params, then qs8-vadd/scalar
    exponent = (int(max(first, second).view(np.int32)) >> 23) - 127
    shift = 20 - exponent
    a, b = (int(np.rint(v * np.float32(2.0**shift))) for v in (first, second))
    bias = (1 << (shift - 1)) - a * zeros[0] - b * zeros[1]
    total = (x.astype(np.int64) * a + y.astype(np.int64) * b + bias) >> shift
    expected = np.clip(total, OUT.low - OUT.zero_point, OUT.high - OUT.zero_point) + OUT.zero_point
    factors = common_shift(float(first), float(second), bits=21)
    given = {"zero_points": tuple(zeros), "storages": (torch.int8, torch.int8)}
    found = add(compute, torch.from_numpy(x), torch.from_numpy(y), factors, OUT, **given)
    assert np.array_equal(found.numpy(), expected.astype(np.int8))


def fused(a, b, c):
    """The float32 nearest to a * b + c, ties to even, rounded once."""
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return 0.0
    unit = Fraction(2) ** (math.frexp(float(exact))[1] - 24)
    return float(round(exact / unit) * unit)


@pytest.mark.parametrize("ratios", [(0.7, 0.31), (1.9, 0.002)])
def test_add_when_100_000_cases_then_as_mlas(ratios):
    (x, y), zeros = integers_and_zeros(2)
    first, second = (np.float32(r) for r in ratios)
    # MlasQLinearAddKernelAvx2Helper on uint8; the few distinct pairs are computed once
    zero_x, zero_y = (np.float32(zero + 128) for zero in zeros)
    zeros_sum = fused(float(first), float(zero_x), float(second * zero_y))
    fixed = np.float32(OUT.zero_point + 128) - np.float32(zeros_sum)
    parts = {int(v): fused(v + 128.0, float(second), float(fixed)) for v in range(-128, 128)}
    known = {}
    expected = []
    for pair in zip(x.tolist(), y.tolist(), strict=True):
        if pair not in known:
            total = fused(pair[0] + 128.0, float(first), parts[pair[1]])
            known[pair] = min(max(int(np.rint(total)) - 128, OUT.low), OUT.high)
        expected.append(known[pair])
    given = {"zero_points": tuple(zeros), "storages": (torch.int8, torch.int8)}
    values, ratios = (torch.from_numpy(v) for v in (x, y)), (float(first), float(second))
    found = add_by_ratios(compute, *values, ratios, OUT, **given)
    assert found.tolist() == expected


@pytest.mark.parametrize("scales", [(0.037, 0.3), (2.0**-9, 0.5), (3.3e-6, 0.01), (1.7, 90.0)])
def test_requantize_when_100_000_cases_then_as_onednn(scales):
    total = accumulators(5)
    both, output = (np.float32(scale) for scale in scales)
    bias = np.random.default_rng(6).normal(0, 20 * output, CASES).astype(np.float32)
    # ref_convolution_int8.cpp, execute_forward: scales, bias, output scale, zero point; then
    # saturate and nearbyint (q10n::saturate_and_round). Of the kernels: both scales multiplied
    # first (scale_utils.cpp, precompute_scales), the inverse of the output's
    # (x64/jit_avx512_core_amx_convolution.cpp)
    real = total.astype(np.float32) * both
    real = (real + bias) * (np.float32(1.0) / output) + np.float32(OUT.zero_point)
    expected = np.rint(np.clip(real, np.float32(OUT.low), np.float32(OUT.high)))
    inverse = float(np.float32(1.0) / output)
    factor = Factor(kind=PROFILES["onednn"].requantization, values=(float(both), inverse))
    found = requantize(compute, torch.from_numpy(total), factor, OUT, bias=torch.from_numpy(bias))
    assert np.array_equal(found.numpy(), expected.astype(np.int8))


def test_requantize_when_100_000_products_then_as_mlas_multiplies():
    total, scale = accumulators(7) >> 14, np.float32(0.0005)
    # MlasQLinearMulVectorS16 on uint8: product and sum are rounded one by one
    real = total.astype(np.float32) * scale + np.float32(OUT.zero_point + 128)
    expected = np.clip(np.rint(real) - 128, OUT.low, OUT.high)
    factor = Factor(kind=PROFILES["onnxruntime_x86"].multiplication, values=(float(scale),))
    found = requantize(compute, torch.from_numpy(total), factor, OUT)
    assert np.array_equal(found.numpy(), expected.astype(np.int8))


def test_average_when_100_000_cases_then_as_tosa():
    total = accumulators(3) >> 10
    counts = np.random.default_rng(4).integers(1, 2000, CASES)
    out = OutputRange(zero_point=0, low=-(2**24), high=2**24, storage=torch.int32)
    found = requantize(
        compute, torch.from_numpy(total), reciprocal_of(torch.from_numpy(counts)), out
    )
    expected = []
    for value, count in zip(total.tolist(), counts.tolist(), strict=True):
        k = 0
        while (1 << k) < count:
            k += 1
        multiplier, shift = (((1 << 30) + 1) << k) // count, 30 + k
        assert count == 1 or 1 << 30 <= multiplier < 1 << 31
        expected.append((value * multiplier + (1 << (shift - 1))) >> shift)
    assert np.clip(expected, out.low, out.high).tolist() == found.tolist()
