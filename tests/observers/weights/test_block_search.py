"""Scales of blocks: what is found is what is kept, and never worse than the start."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.formats import format_arithmetic as arithmetic
from pt2e_quant.core.formats.block_qparams import keep_scale
from pt2e_quant.core.formats.format_schemes import FORMAT_SCHEMES, code_book_scheme
from pt2e_quant.core.formats.number_formats import CodeBook, FloatFormat
from pt2e_quant.core.formats.scale_format import ScaleFormat
from pt2e_quant.core.granularity import PerBlock, PerChannel, PerGroup, PerTensor
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.observers.weights.block_search import find_block_qparams
from pt2e_quant.observers.weights.weight_search import WeightSearch

NAMES = [
    *("fp8", "fp8_e5m2_blocks", "fp6_weight_only", "fp4_weight_only", "mxfp8", "mxfp6_e3m2"),
    *("mxfp4", "nvfp4", "nf4", "nf4_double", "lut3", "lut2_per_tensor", "w1"),
]


def through(x, qparams):
    """Quantized and dequantized by what is kept."""
    form, block = qparams.scheme.format, qparams.block
    scale = None if qparams.scale is None else qparams.scale.real()
    if isinstance(form, FloatFormat):
        rest = scale, None, block, form.name
        return arithmetic.dequantize_float(arithmetic.quantize_float(x, *rest), *rest)
    if isinstance(form, CodeBook):
        rest = qparams.table, scale, block
        return arithmetic.dequantize_codebook(arithmetic.quantize_codebook(x, *rest), *rest)
    rest = scale, qparams.zero_point, block, *qparams.scheme.range, torch.int8
    return arithmetic.dequantize_block(arithmetic.quantize_block(x, *rest), *rest)


@settings(max_examples=25)
@given(
    rows=st.integers(1, 6),
    groups=st.integers(1, 3),
    power=st.integers(-30, 30),
    outlier=st.booleans(),
    seed=st.integers(0, 99),
)
@pytest.mark.parametrize("name", NAMES)
def test_search_when_any_weight_then_finite_and_no_worse_than_the_greatest(
    name, rows, groups, power, outlier, seed
):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 64 * groups, generator=generator) * 2.0**power
    if outlier:
        x[0, 0] *= 1000
    errors = []
    for search in (WeightSearch.MIN_MAX, WeightSearch.MSE):
        found = through(x, find_block_qparams(x, FORMAT_SCHEMES[name].weight, search))
        assert found.isfinite().all()
        errors.append((found - x).double().square().sum())
    if name != "nf4_double":  # its scales are rounded together, once all of them are found
        assert errors[1] <= errors[0] * (1 + 1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_search_when_all_is_zero_then_zero(name):
    x = torch.zeros(2, 64)
    found = through(x, find_block_qparams(x, FORMAT_SCHEMES[name].weight, WeightSearch.MSE))
    assert found.abs().max() < 1e-30


@pytest.mark.parametrize("granularity", [PerTensor(), PerChannel(0), PerGroup(8), PerBlock((2, 4))])
@pytest.mark.parametrize("symmetric", [True, False])
def test_integers_when_in_blocks_then_within_half_a_step_of_the_kept_scale(granularity, symmetric):
    torch.manual_seed(0)
    x = torch.randn(4, 16) + 0.3
    scheme = scheme_named("w4", symmetric=symmetric, scales=ScaleFormat(dtype=torch.bfloat16))
    found = find_block_qparams(
        x, replace(scheme.weight, granularity=granularity), WeightSearch.MIN_MAX
    )
    assert found.scale.values.dtype is torch.bfloat16
    assert (found.zero_point is None) == symmetric
    step = found.scale.real().amax()
    # Half a step, half of one for the zero_point, and what rounding the scale to 8 bits takes from
    # the ends of the range.
    assert (through(x, found) - x).abs().max() <= step * (0.5 + 8 / 256 + 0.5)


@given(st.lists(st.floats(2.0**-60, 2.0**60, width=32), min_size=1, max_size=300))
def test_scales_when_doubled_then_within_half_a_step_of_their_group_and_positive(values):
    scale = torch.tensor(values)
    kept = keep_scale(scale, ScaleFormat(double_group=256))
    assert kept.values.dtype is torch.uint8
    assert kept.steps.numel() == -(-len(values) // 256)
    steps = kept.steps.repeat_interleave(256)[: len(values)]
    assert bool((kept.real() > 0).all())
    assert bool(((kept.real() - scale).abs() <= steps * 1.0001).all())


@given(st.lists(st.floats(2.0**-60, 2.0**60, width=32), min_size=1, max_size=20))
def test_scales_when_powers_of_two_then_the_least_not_below(values):
    scale = torch.tensor(values)
    found = keep_scale(scale, ScaleFormat(is_power_of_two=True)).real()
    assert bool((found >= scale).all() & (found / 2 < scale).all())
    assert bool((torch.frexp(found).mantissa == 0.5).all())


def test_search_when_hqq_is_asked_of_floats_then_refused():
    with pytest.raises(ConfigError, match="HQQ is for integers"):
        find_block_qparams(torch.ones(1, 64), FORMAT_SCHEMES["nf4"].weight, WeightSearch.HQQ)


def test_fitted_tables_when_kept_in_a_form_of_scales_alone_then_refused():
    scheme = code_book_scheme(
        CodeBook(name="own", bits=2), PerTensor(), scales=ScaleFormat(double_group=256)
    )
    with pytest.raises(ConfigError, match="are not kept as"):
        find_block_qparams(torch.ones(1, 64), scheme.weight, WeightSearch.MIN_MAX)
