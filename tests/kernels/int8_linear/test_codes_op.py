"""Float rows by integer weights, held to sums in float64."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.kernels.int8_linear import codes_op
from pt2e_quant.kernels.int8_linear.codes_op import LinearOfCodes, linear_of_codes

SIZES = st.integers(1, 40)


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def drawn(seed, shape, n, *, affine, per_row, with_bias):
    of_seed = torch.Generator().manual_seed(seed)
    low = 0 if affine else -128
    codes = torch.randint(low, low + 256, (n, shape[-1]), generator=of_seed)
    count = n if per_row else 1
    zero = torch.randint(0, 256, (count, 1), generator=of_seed) if affine else None
    return (
        torch.randn(shape, generator=of_seed),
        codes.to(torch.uint8 if affine else torch.int8),
        torch.rand(count, generator=of_seed) + 0.01,
        None if zero is None else zero.to(torch.uint8),
        torch.randn(n, generator=of_seed) if with_bias else None,
    )


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**20),
    batch=st.lists(st.integers(0, 5), max_size=2),
    sizes=st.tuples(SIZES, SIZES, st.integers(1, 64)),
    affine=st.booleans(),
    per_row=st.booleans(),
    with_bias=st.booleans(),
    block=st.sampled_from([1, 50, 1 << 20]),
)
def test_linear_of_codes_when_weights_are_drawn_then_near_the_exact_sums(
    seed, batch, sizes, affine, per_row, with_bias, block
):
    rows, n, k = sizes
    kinds = {"affine": affine, "per_row": per_row, "with_bias": with_bias}
    x, codes, scale, zero, bias = drawn(seed, (*batch, rows, k), n, **kinds)
    integers = codes.double() - (0 if zero is None else zero.double())
    expected = (x.double() @ integers.t()) * scale + (0 if bias is None else bias)
    bound = (x.double().abs() @ integers.abs().t()) * scale * k * 2.0**-23 + 1e-5
    with mock.patch.multiple(codes_op, _BLOCK=block, _SMALL=block):
        found = linear_of_codes(x, codes, scale, zero, bias)
    assert found.shape == expected.shape
    assert found.is_contiguous()
    assert bool(((found - expected).abs() <= bound).all())


@pytest.mark.parametrize("shape", [(1, 1100), (3, 1100), (2, 5, 1100), (0, 1100)])
def test_linear_of_codes_when_a_weight_has_many_blocks_then_rows_of_integers_are_exact(
    threads, shape
):
    _, codes, *_ = drawn(0, shape, 2000, affine=False, per_row=True, with_bias=False)
    assert codes.numel() > 2 * codes_op._BLOCK
    x = torch.randint(-100, 100, shape, generator=torch.Generator().manual_seed(1)).float()
    expected = (x.double() @ codes.double().t()).float()
    assert float(expected.abs().max() if expected.numel() else 0) < 2**24
    assert torch.equal(linear_of_codes(x, codes, torch.ones(2000)), expected)


def test_linear_of_codes_when_its_operator_is_checked_then_torch_accepts_it():
    for affine in (False, True):
        inputs = drawn(0, (2, 3, 8), 5, affine=affine, per_row=True, with_bias=affine)
        torch.library.opcheck(LinearOfCodes, inputs)
