"""Every code and every rounding of the small floats, held against ml_dtypes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pt2e_quant.core.errors import ConfigError, UnsupportedError
from pt2e_quant.core.formats.float_codes import decode_float, encode_float, to_scale_dtype
from pt2e_quant.core.formats.number_formats import FLOAT_FORMATS, NF4, CodeBook, float_format

ml_dtypes = pytest.importorskip("ml_dtypes", reason="comes with onnx")
FORMATS = list(FLOAT_FORMATS.values())


def codes_of(form):
    codes = torch.arange(1 << form.bits, dtype=torch.uint8)
    return codes if form.storage == torch.uint8 else codes.view(form.storage)


def reference(form):
    """Every value of a format by its code, in float64, as ml_dtypes reads them."""
    raw = np.arange(1 << form.bits, dtype=np.uint8)
    return raw.view(getattr(ml_dtypes, form.name)).astype(np.float64)


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_decode_when_every_code_then_the_values_of_ml_dtypes(form):
    ours = decode_float(codes_of(form), form).double().numpy()
    np.testing.assert_array_equal(ours, reference(form))
    assert np.array_equal(np.signbit(ours), np.signbit(reference(form)))


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_encode_when_every_value_then_its_own_code(form):
    codes = codes_of(form)
    values = decode_float(codes, form)
    finite = values.isfinite()
    back = encode_float(values, form)
    assert torch.equal(back.view(torch.uint8)[finite], codes.view(torch.uint8)[finite])


def nearest(x, form):
    """The value nearest to x by search over all, ties to the even code, saturated."""
    values = reference(form)
    half = values[: 1 << (form.bits - 1)]
    half = half[np.isfinite(half)]
    size = min(abs(float(x)), float(half.max()))
    distance = np.abs(half - size)
    best = np.flatnonzero(distance == distance.min())
    chosen = half[best[best % 2 == 0][0] if len(best) > 1 else best[0]]
    return -chosen if np.signbit(x) else chosen


@pytest.mark.parametrize("form", FORMATS, ids=str)
@given(x=st.floats(width=32, allow_nan=False), near=st.floats(-1.25, 1.25, width=32))
def test_encode_when_any_float_then_nearest_ties_to_even_saturated(form, x, near):
    for value in (x, near * form.max, near, near * 2.0**-14):
        value = np.float32(value)
        found = decode_float(encode_float(torch.tensor([value]), form), form).item()
        assert found == nearest(value, form)


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_encode_when_halfway_between_neighbours_then_even(form):
    values = np.unique(reference(form)[np.isfinite(reference(form))])
    middles = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    found = decode_float(encode_float(torch.from_numpy(middles), form), form).numpy()
    np.testing.assert_array_equal(found, [nearest(m, form) for m in middles])


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_encode_when_infinite_or_nan_then_saturates_or_stays(form):
    ends = encode_float(torch.tensor([torch.inf, -torch.inf]), form)
    assert decode_float(ends, form).tolist() == [form.max, -form.max]
    nan = decode_float(encode_float(torch.tensor([torch.nan]), form), form)
    assert nan.isnan().item() if form.has_nan else nan.item() == 0


def test_scales_when_e8m0_then_every_power_and_down():
    powers = torch.pow(2.0, torch.arange(-126, 128, dtype=torch.float64)).float()
    for part in (1.0, 1.5, 1.999999):
        kept = to_scale_dtype(powers * part, torch.float8_e8m0fnu)
        assert torch.equal(kept.float(), powers)
    raw = kept.view(torch.uint8).numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    np.testing.assert_array_equal(raw, powers.numpy())
    assert to_scale_dtype(torch.tensor([torch.nan]), torch.float8_e8m0fnu).float().isnan().all()


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
)
@given(scale=st.floats(2.0**-126, 2.0**127, width=32))
def test_scales_when_kept_narrow_then_positive_finite_and_near(dtype, scale):
    kept = to_scale_dtype(torch.tensor([scale]), dtype).float().item()
    limits = torch.finfo(dtype)
    assert 0 < kept <= limits.max
    if limits.smallest_normal <= scale <= limits.max:
        assert abs(kept - scale) <= scale * limits.eps / 2


def test_scales_when_nan_then_stays():
    for dtype in (torch.float16, torch.bfloat16, torch.float8_e4m3fn):
        assert to_scale_dtype(torch.tensor([torch.nan]), dtype).float().isnan().all()


def test_names_when_unknown_then_near_ones():
    with pytest.raises(UnsupportedError, match="float8_e4m3fn"):
        float_format("float8_e4m3")


@pytest.mark.parametrize("values", [(1.0, 0.0), (0.0,), tuple(range(5))])
def test_code_books_when_they_do_not_rise_or_fit_then_refused(values):
    with pytest.raises(ConfigError):
        CodeBook(name="own", bits=2, values=values)


def test_nf4_when_built_as_the_paper_says_then_the_table():
    # Section 3: the mean of neighbouring quantiles of N(0, 1), 8 below and 9 above 0, as
    # bitsandbytes' create_normal_map computes them with its offset of 0.9677083.
    normal = torch.distributions.Normal(torch.tensor(0.0).double(), torch.tensor(1.0).double())
    above = normal.icdf(torch.linspace(0.9677083, 0.5, 9).double())[:-1]
    below = -normal.icdf(torch.linspace(0.9677083, 0.5, 8).double())[:-1]
    made = torch.cat((above, below, torch.zeros(1).double())).sort().values
    torch.testing.assert_close(NF4.table(), (made / made.max()).float(), atol=2e-7, rtol=0)
