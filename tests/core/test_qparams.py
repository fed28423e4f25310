import pytest
import torch
import torch.ao.quantization.fx._decomposed  # defines the ops compared with
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.ao.quantization import observer as upstream

from pt2e_quant.core.dtypes import info
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.qparams import (
    QParams,
    choose_qparams,
    dequantize,
    fake_quantize,
    quantize,
    symmetric_zero_point,
)

OPS = torch.ops.quantized_decomposed
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
TARGETS = st.sampled_from(
    [
        (torch.int8, -128, 127),
        (torch.int8, -127, 127),
        (torch.int8, -8, 7),
        (torch.uint8, 0, 255),
        (torch.uint8, 0, 127),
        (torch.int16, -32768, 32767),
        (torch.uint16, 0, 65535),
    ]
)


def normal(shape, seed, gain=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * gain


@settings(max_examples=300)
@given(
    target=TARGETS,
    seed=st.integers(0, 10_000),
    scale=st.floats(1e-6, 1e4),
    share=st.floats(0, 1),
    dtype=st.sampled_from(FLOATS),
)
def test_per_tensor_when_quantized_then_bit_equal_to_the_ops(target, seed, scale, share, dtype):
    integer, quant_min, quant_max = target
    zero_point = quant_min + round(share * (quant_max - quant_min))
    qp = QParams.per_tensor(scale, zero_point, quant_min, quant_max, integer)
    rest = (qp.scale_float, zero_point, quant_min, quant_max, integer)
    # Whole and half steps too: where ties and products with 1 / scale decide.
    steps = torch.arange(-20, 20) / 2 * scale
    x = torch.cat([normal(100, seed, scale * 100), steps, torch.tensor([0.0, 3e38, -3e38])])
    x = x.to(dtype).nan_to_num()
    q = quantize(x, qp)
    assert torch.equal(q, OPS.quantize_per_tensor(x, *rest))
    for out_dtype in FLOATS:
        theirs = OPS.dequantize_per_tensor(q, *rest, out_dtype=out_dtype)
        # NaN: the op computes in out_dtype, and 65535 is no float16.
        torch.testing.assert_close(
            dequantize(q, qp, out_dtype), theirs, rtol=0, atol=0, equal_nan=True
        )
    assert fake_quantize(torch.zeros(1, dtype=dtype), qp).item() == 0.0


@settings(max_examples=60)
@given(
    target=TARGETS,
    seed=st.integers(0, 10_000),
    axis=st.integers(0, 2),
    dtype=st.sampled_from(FLOATS),
)
def test_per_channel_when_quantized_then_bit_equal_to_the_ops(target, seed, axis, dtype):
    integer, quant_min, quant_max = target
    assume(integer != torch.uint16)  # the op itself fails: torch promotes no uint16
    x = normal((3, 4, 5), seed).to(dtype)
    count = x.shape[axis]
    scale = normal(count, seed + 1).abs() / 10 + 1e-5
    zero_point = torch.randint(
        quant_min, quant_max + 1, (count,), generator=torch.Generator().manual_seed(seed)
    ).to(torch.int32)
    qp = QParams(
        scale=scale,
        zero_point=zero_point,
        quant_min=quant_min,
        quant_max=quant_max,
        dtype=integer,
        axis=axis,
    )
    rest = (scale, zero_point, axis, quant_min, quant_max, integer)
    q = quantize(x, qp)
    assert torch.equal(q, OPS.quantize_per_channel(x, *rest))
    for out_dtype in FLOATS:
        theirs = OPS.dequantize_per_channel(q, *rest, out_dtype=out_dtype)
        assert torch.equal(dequantize(q, qp, out_dtype), theirs)


@pytest.mark.parametrize("axis", [None, 0, 1, 2, -1])
@pytest.mark.parametrize("shape", [(301, 17, 20), (2, 300, 200), (1, 3, 70_000)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_quantize_when_tensor_spans_many_blocks_then_bit_equal_to_the_ops(axis, shape, dtype):
    x = normal(shape, 0).to(dtype)
    count = 1 if axis is None else shape[axis]
    scale = normal(count, 1).abs() / 10 + 1e-5
    zero_point = torch.randint(-128, 128, (count,), generator=torch.Generator().manual_seed(2))
    limits = {"quant_min": -128, "quant_max": 127, "dtype": torch.int8}
    qp = QParams(scale=scale, zero_point=zero_point.to(torch.int32), axis=axis, **limits)
    if axis is None:
        theirs = OPS.quantize_per_tensor(x, qp.scale_float, qp.zero_point_int, -128, 127, qp.dtype)
    else:
        rest = (axis % 3, -128, 127, torch.int8)
        theirs = OPS.quantize_per_channel(x, scale, qp.zero_point, *rest)
    assert torch.equal(quantize(x, qp), theirs)


@pytest.mark.parametrize("is_affine", [False, True])
def test_quantize_when_groups_span_many_blocks_then_bit_equal_to_the_op(is_affine):
    x, scale = normal((600, 256), 0), normal((600, 8), 1).abs() / 10 + 1e-5
    zero_point = torch.randint(-8, 8, (600, 8), generator=torch.Generator().manual_seed(2))
    zero_point = (zero_point * is_affine).to(torch.int32)
    limits = {"quant_min": -8, "quant_max": 7, "dtype": torch.int8}
    qp = QParams(scale=scale, zero_point=zero_point, group_size=32, **limits)
    theirs = OPS.quantize_per_channel_group(x, scale, zero_point, -8, 7, torch.int8, 32)
    assert torch.equal(quantize(x, qp), theirs)


@settings(max_examples=200)
@given(
    ends=st.lists(
        st.tuples(st.floats(-1e5, 1e5, width=32), st.floats(-1e5, 1e5, width=32)),
        min_size=1,
        max_size=6,
    ),
    target=TARGETS,
    has_own_range=st.booleans(),
    symmetric=st.booleans(),
    per_channel=st.booleans(),
    eps=st.sampled_from([2**-12, float(torch.finfo(torch.float32).eps)]),
)
def test_choose_when_range_is_any_then_equals_torch_ao(
    ends, target, has_own_range, symmetric, per_channel, eps
):
    dtype, quant_min, quant_max = target
    if not has_own_range:
        quant_min, quant_max = info(dtype).quant_min, info(dtype).quant_max
    qscheme = {
        (False, False): torch.per_tensor_affine,
        (False, True): torch.per_tensor_symmetric,
        (True, False): torch.per_channel_affine,
        (True, True): torch.per_channel_symmetric,
    }[per_channel, symmetric]
    kind = upstream.PerChannelMinMaxObserver if per_channel else upstream.MinMaxObserver
    own = {"quant_min": quant_min, "quant_max": quant_max} if has_own_range else {}
    theirs = kind(dtype=dtype, qscheme=qscheme, eps=eps, **own)
    pairs = torch.tensor([sorted(pair) for pair in ends])
    low, high = pairs.T if per_channel else pairs[0]
    expected = theirs._calculate_qparams(low, high)
    scale, zero_point = choose_qparams(
        low,
        high,
        quant_min=quant_min,
        quant_max=quant_max,
        symmetric=symmetric,
        eps=eps,
        zero_point_if_symmetric=symmetric_zero_point(
            dtype, quant_min, quant_max, has_own_range=has_own_range
        ),
    )
    # Upstream takes the middle of uint16 also where the user gave a range; so do we.
    assert torch.equal(scale, expected[0])
    assert torch.equal(zero_point.long(), expected[1].long())
    assert scale.shape == zero_point.shape == expected[0].shape


@settings(max_examples=100)
@given(low=st.floats(-1e4, 0, width=32), high=st.floats(0, 1e4), target=TARGETS)
def test_choose_when_affine_then_both_ends_are_within_a_step(low, high, target):
    dtype, quant_min, quant_max = target
    ends = torch.tensor([low, high])
    scale, zero_point = choose_qparams(
        ends[0], ends[1], quant_min=quant_min, quant_max=quant_max, symmetric=False
    )
    qp = QParams(
        scale=scale, zero_point=zero_point, quant_min=quant_min, quant_max=quant_max, dtype=dtype
    )
    assert ((fake_quantize(ends, qp) - ends).abs() <= scale * 1.001).all()


def test_choose_when_range_is_as_wide_as_float32_then_scale_is_finite():
    low, high = torch.tensor(-3.4e38), torch.tensor(3.4e38)
    scale, zero_point = choose_qparams(low, high, quant_min=-128, quant_max=127, symmetric=False)
    assert torch.isfinite(scale).all()
    assert -128 <= zero_point.item() <= 127


def test_choose_when_float16_ends_then_computed_in_float32():
    low, high = torch.tensor(-6e4, dtype=torch.float16), torch.tensor(6e4, dtype=torch.float16)
    scale, _ = choose_qparams(low, high, quant_min=0, quant_max=255, symmetric=False)
    assert scale.item() == pytest.approx(2 * high.item() / 255)


def test_quantize_when_sub_byte_then_stored_in_a_byte():
    qp = QParams.per_tensor(0.5, 0, -8, 7, torch.int4)
    q = quantize(torch.tensor([-100.0, -0.75, 0.25, 100.0]), qp)
    assert q.dtype == torch.int8
    assert q.tolist() == [-8, -2, 0, 7]
    assert dequantize(q, qp).tolist() == [-4.0, -1.0, 0.0, 3.5]


def test_quantize_when_beyond_int32_then_saturates():
    limits = info(torch.int32)
    qp = QParams.per_tensor(1e-6, 0, limits.quant_min, limits.quant_max, torch.int32)
    q = quantize(torch.tensor([1e6, -1e6, 0.5]), qp)
    assert q.tolist() == [limits.quant_max, limits.quant_min, 500_000]


def test_uint16_when_per_channel_then_round_trips():
    scale = torch.tensor([0.5, 0.25])
    qp = QParams(
        scale=scale,
        zero_point=torch.tensor([7, 0], dtype=torch.int32),
        quant_min=0,
        quant_max=65535,
        dtype=torch.uint16,
        axis=0,
    )
    x = torch.tensor([[-3.5, 1.0], [0.0, 16000.0]])
    assert torch.equal(fake_quantize(x, qp), x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": torch.ones(1, dtype=torch.float64)}, "float32 scale"),
        ({"scale": torch.ones(2)}, "differ in shape"),
        ({"quant_max": 128}, "no range within"),
        ({"axis": 0, "scale": torch.ones(()), "zero_point": torch.zeros(()).int()}, "one axis"),
    ],
)
def test_qparams_when_contradictory_then_refused(change, message):
    fields = {
        "scale": torch.ones(1),
        "zero_point": torch.zeros(1, dtype=torch.int32),
        "quant_min": -128,
        "quant_max": 127,
        "dtype": torch.int8,
    }
    with pytest.raises(ConfigError, match=message):
        QParams(**{**fields, **change})


def test_quantize_when_axis_is_out_of_range_then_refuses():
    qp = QParams(
        scale=torch.ones(2),
        zero_point=torch.zeros(2, dtype=torch.int32),
        quant_min=-128,
        quant_max=127,
        dtype=torch.int8,
        axis=2,
    )
    with pytest.raises(ConfigError, match="axis 2 is out of range"):
        quantize(torch.ones(2, 2), qp)
