"""Float rows times integer weights through limbs of 8 bits, held to float64 within the bound."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.kernels.onednn.exact_products import onednn_is_exact
from pt2e_quant.kernels.onednn.limbs_op import (
    LIMB_LIMIT,
    LinearOfLimbs,
    error_bound,
    limb_shifts,
    linear_of_limbs_at_once,
    weight_limbs,
)
from pt2e_quant.kernels.onednn.limbs_site import class_of
from pt2e_quant.kernels.onednn.operators import PackLinear
from tests.kernels.operands import float_rows, integers, scales

needs_vnni = pytest.mark.skipif(not onednn_is_exact(), reason="oneDNN saturates here")
SIZES = st.sampled_from([1, 2, 5, 16, 33])
FEATURES = st.sampled_from([1, 3, 32, 64, 129, 700])
FLOAT = (torch.float32,)


def of_int8(x, weight, scale, bias=None):
    """The operator on a weight of one limb."""
    zeros = torch.zeros(len(scale), dtype=torch.int32)
    packed = PackLinear(weight, None)
    return LinearOfLimbs(x, packed, scale, zeros, limb_shifts(x.dim()), None, None, bias)


def of_float(x, real, bias=None):
    """The operator on a weight of two limbs."""
    high, low, scale = weight_limbs(real)
    zeros = torch.zeros(len(scale), dtype=torch.int32)
    parts = PackLinear(high, None), scale * 256, zeros, limb_shifts(x.dim())
    return LinearOfLimbs(x, *parts, PackLinear(low, None), scale, bias)


def holds(made, x, real, bias, *, low):
    exact = x.double() @ real.double().t() + (0 if bias is None else bias.double())
    return bool(((made - exact).abs() <= error_bound(x, real, bias, low=low)).all())


@needs_vnni
@settings(max_examples=60)
@given(st.data(), SIZES, SIZES, FEATURES, st.booleans())
def test_int8_weights_when_multiplied_then_within_the_bound(data, M, N, K, has_bias):
    x = data.draw(float_rows((M, K), FLOAT))
    weight = data.draw(integers((N, K)))
    scale = data.draw(scales(N, 0.1))
    bias = torch.randn(N) if has_bias else None
    made = of_int8(x, weight, scale, bias)
    real = (weight.double() * scale.double().unsqueeze(1)).float()
    assert made.shape == (M, N)
    assert holds(made, x, real, bias, low=False)


@needs_vnni
@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 3, 64), (200, 64), (0, 64)], ids=str)
@pytest.mark.parametrize("is_turned", [False, True], ids=["contiguous", "turned"])
def test_int8_weights_when_multiplied_at_once_then_equal_to_the_bit(shape, is_turned):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * 1e3
    if is_turned:
        x = x.flip(-1).t().contiguous().t() if len(shape) == 2 else x.flip(-1)
    weight = torch.randint(-128, 128, (5, 64), generator=generator).to(torch.int8)
    scale, zeros = torch.rand(5, generator=generator), torch.zeros(5, dtype=torch.int32)
    for bias in (None, torch.randn(5, generator=generator)):
        made = linear_of_limbs_at_once(x, PackLinear(weight, None), scale, zeros, bias)
        assert torch.equal(made, of_int8(x, weight, scale, bias))


@needs_vnni
@settings(max_examples=40)
@given(st.data(), SIZES, SIZES, FEATURES, st.booleans())
def test_float_weights_when_multiplied_in_two_limbs_then_within_the_bound(data, M, N, K, has_bias):
    x, real = data.draw(float_rows((M, K), FLOAT)), data.draw(float_rows((N, K), FLOAT))
    bias = torch.randn(N) if has_bias else None
    assert holds(of_float(x, real, bias), x, real, bias, low=True)


@settings(max_examples=60)
@given(st.data(), SIZES, FEATURES)
def test_weight_limbs_when_inputs_are_drawn_then_are_within_half_a_step_of_the_weight(data, N, K):
    real = data.draw(float_rows((N, K), FLOAT))
    high, low, scale = weight_limbs(real)
    made = (256 * high.double() + low.double()) * scale.double().unsqueeze(1)
    # The scale itself is rounded to float32.
    slack = 1 + 2.0**-7
    assert ((made - real).abs() <= slack * scale.double().unsqueeze(1) / 2).all()
    assert (256 * high.int() + low.int()).abs().max() <= LIMB_LIMIT


@settings(max_examples=40)
@given(st.data(), SIZES, st.sampled_from([32, 64, 128]), st.integers(1, 3))
def test_weight_limbs_when_the_weight_is_grouped_then_its_codes_come_back(data, N, G, groups):
    """Where scales of a row differ by less than a thousandfold, as those of trained weights do."""
    codes = data.draw(integers((N, groups * G), 0, 15, torch.uint8)).double()
    zeros = data.draw(integers((N, groups), 0, 15, torch.uint8)).double().repeat_interleave(G, 1)
    scale = torch.rand(N, groups, dtype=torch.float64) * 0.1 + 1e-4
    each = scale.float().double().repeat_interleave(G, 1)
    high, low, row = weight_limbs(((codes - zeros) * each).float())
    real = (256 * high.double() + low.double()) * row.double().unsqueeze(1)
    assert torch.equal((real / each + zeros).round(), codes)


@needs_vnni
@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-30, 1e30])
def test_product_when_rows_have_every_size_then_they_share_a_call(size):
    torch.manual_seed(0)
    x, real = torch.randn(3, 64), torch.randn(8, 64)
    x[1] *= size
    made = of_float(x, real)
    assert holds(made, x, real, None, low=True)
    assert torch.equal(made[[0, 2]], of_float(x[[0, 2]], real))


@needs_vnni
@pytest.mark.parametrize("wrong", [float("inf"), float("nan")])
def test_product_when_a_row_is_not_finite_then_gives_nothing_finite_there_and_leaves_the_others(
    wrong,
):
    torch.manual_seed(0)
    x, weight = torch.randn(3, 64), torch.randint(-128, 128, (8, 64), dtype=torch.int8)
    expected = of_int8(x, weight, torch.ones(8))
    x[1, 5] = wrong
    made = of_int8(x, weight, torch.ones(8))
    assert not made[1].isfinite().any()
    assert torch.equal(made[[0, 2]], expected[[0, 2]])


@needs_vnni
@pytest.mark.parametrize("shape", [(64,), (2, 3, 64), (1, 2, 2, 64)])
def test_product_when_x_has_any_rank_then_is_that_of_its_rows_in_two_dimensions(shape):
    x, weight = torch.randn(shape), torch.randint(-128, 128, (8, 64), dtype=torch.int8)
    made = of_int8(x, weight, torch.ones(8))
    expected = of_int8(x.reshape(-1, 64), weight, torch.ones(8))
    assert torch.equal(made, expected.reshape(*shape[:-1], 8))


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)])
def test_product_when_there_are_no_rows_then_gives_no_rows(shape):
    weight = torch.ones(8, 64, dtype=torch.int8)
    assert of_int8(torch.zeros(shape), weight, torch.ones(8)).shape == (*shape[:-1], 8)


def test_product_when_rows_want_a_gradient_then_gives_a_result_without_one():
    x = torch.randn(2, 64, requires_grad=True)
    weight = torch.ones(8, 64, dtype=torch.int8)
    assert not of_int8(x, weight, torch.ones(8)).requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_product_when_activations_have_another_dtype_then_refuses_it_by_name(dtype):
    weight = torch.ones(8, 64, dtype=torch.int8)
    with pytest.raises(UnsupportedError, match=f"float32 activations, found {dtype}"):
        of_int8(torch.zeros(2, 64, dtype=dtype), weight, torch.ones(8))


def test_operator_when_run_on_fake_tensors_then_has_the_results_shape_and_dtype():
    with FakeTensorMode():
        weight = torch.empty(8, 64, dtype=torch.int8)
        made = of_int8(torch.empty(2, 3, 64), weight, torch.empty(8), torch.empty(8))
    assert (made.shape, made.dtype) == ((2, 3, 8), torch.float32)


@pytest.mark.parametrize(
    ("rows", "weight", "named"),
    [
        (1, 384 * 384, "weight < 2^18, M <= 1"),
        (64, 768 * 768, "weight < 2^20, M <= 128"),
        (129, 1024 * 1024, "weight < 2^22, M > 128"),
        (None, 4096 * 4096, "weight >= 2^22, any M"),
    ],
)
def test_class_of_when_rows_and_weights_vary_then_tells_them_apart(rows, weight, named):
    assert class_of("rows", rows, weight) == f"float x, rows, {named}"
