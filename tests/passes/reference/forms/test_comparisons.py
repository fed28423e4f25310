"""Comparisons and places of extremes of integers, against the float operators."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import pt2e_quant as pq
from pt2e_quant.backends.registry import get
from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.core.qparams import QParams, dequantize
from pt2e_quant.observers.training.fake_quantize import disable_observer
from pt2e_quant.passes.reference.forms.comparisons import COMPARISON_FORMS
from pt2e_quant.passes.reference.forms.site import Declined, Operand, computed

aten = torch.ops.aten
COMPARE, PLACE = COMPARISON_FORMS
ORDERS = ("gt", "ge", "lt", "le", "eq", "ne")
DTYPES = st.sampled_from((torch.int8, torch.uint8, torch.int16))
SCALES = st.floats(1e-6, 1e3).map(lambda value: float(torch.tensor(value)))


def every(dtype: torch.dtype) -> Tensor:
    limits = torch.iinfo(dtype)
    return torch.arange(limits.min, limits.max + 1).to(dtype)


def operand(integers: Tensor, scale: float, zero_point: int) -> Operand[Tensor]:
    limits = torch.iinfo(integers.dtype)
    qparams = QParams.per_tensor(scale, zero_point, limits.min, limits.max, integers.dtype)
    return Operand(value=integers, like=integers, qparams=qparams)


@st.composite
def operands(draw: st.DrawFn) -> Operand[Tensor]:
    dtype = draw(DTYPES)
    limits = torch.iinfo(dtype)
    return operand(every(dtype), draw(SCALES), draw(st.integers(limits.min, limits.max)))


@settings(max_examples=60, deadline=None)
@given(
    x=operands(), at=st.integers(-300, 300), between=st.booleans(), order=st.sampled_from(ORDERS)
)
def test_comparison_when_with_a_number_then_as_in_float(x, at, between, order):
    number = float((at + 0.5 * between) * x.qparams.scale)  # on values and between them
    target = getattr(aten, order).Scalar
    found = computed(COMPARE, target, {"self": x, "other": number}, None)
    assert torch.equal(found, target(dequantize(x.value, x.qparams), number))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("number", [0.0, float("inf"), float("-inf"), 1e30, -1e30, 7])
def test_comparison_when_the_number_is_far_away_then_as_in_float(order, number):
    x, target = operand(every(torch.int8), 0.1, -128), getattr(aten, order).Scalar
    found = computed(COMPARE, target, {"self": x, "other": number}, None)
    assert torch.equal(found, target(dequantize(x.value, x.qparams), number))


@settings(max_examples=40, deadline=None)
@given(x=operands(), data=st.data(), order=st.sampled_from(ORDERS), is_first=st.booleans())
def test_comparison_when_with_a_constant_then_as_in_float_on_both_sides(x, data, order, is_first):
    real = dequantize(x.value, x.qparams)
    drawn = st.lists(st.integers(0, len(real) - 1), min_size=3, max_size=3)
    bounds = real[data.draw(drawn)].unsqueeze(1)
    target = getattr(aten, order).Tensor
    pairs = (bounds, x) if is_first else (x, bounds)
    found = computed(COMPARE, target, dict(zip(("self", "other"), pairs, strict=True)), None)
    expected = target(bounds, real) if is_first else target(real, bounds)
    assert torch.equal(found, expected)


@settings(max_examples=60, deadline=None)
@given(x=operands(), y=operands(), order=st.sampled_from(ORDERS), seed=st.integers(0, 99))
def test_comparison_when_of_two_tensors_then_as_of_exact_numbers(x, y, order, seed):
    drawn = torch.Generator().manual_seed(seed)
    x, y = (
        operand(
            v.value[torch.randint(len(v.value), (40,), generator=drawn)],
            v.qparams.scale_float,
            v.qparams.zero_point_int,
        )
        for v in (x, y)
    )
    found = computed(COMPARE, getattr(aten, order).Tensor, {"self": x, "other": y}, None)
    left, right = (
        [(int(q) - v.qparams.zero_point_int) * Fraction(v.qparams.scale_float) for q in v.value]
        for v in (x, y)
    )
    for a, b, told in zip(left, right, found.tolist(), strict=True):
        close = abs(a - b) <= max(abs(a), abs(b)) * Fraction(1, 1 << 22)
        if not close or x.qparams.scale_float == y.qparams.scale_float:
            assert told == getattr(a, f"__{order}__")(b)


def test_comparison_when_with_nan_then_declined():
    x = operand(every(torch.int8), 0.1, 0)
    with pytest.raises(Declined, match="NaN"):
        computed(COMPARE, aten.gt.Scalar, {"self": x, "other": float("nan")}, None)


@pytest.mark.parametrize("target", [aten.argmax.default, aten.argmin.default])
def test_place_of_an_extreme_when_computed_then_that_of_the_real_values(target):
    integers = torch.randint(-128, 128, (5, 40), generator=torch.Generator().manual_seed(0))
    x = operand(integers.to(torch.int8), 0.3, 7)
    arguments = {"self": x, "dim": 1, "keepdim": False}
    found = computed(PLACE, target, arguments, None)
    assert torch.equal(found, target(dequantize(x.value, x.qparams), 1))


class Chosen(nn.Module):
    """Comparisons with numbers, with a tensor and with a constant, and what they choose."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.limits = nn.Buffer(torch.linspace(-0.5, 0.5, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(x)
        y = torch.where(y > 0.1, y, torch.where(y < -0.2, y * 0.5, 0.25))
        z = self.second(y)
        z = torch.where(z >= y, z, y) * (z != 0).float()
        return torch.where(z > self.limits, z, -1.0), z.argmax(-1)


def quantized(model: nn.Module, quantizer, **options):
    torch.manual_seed(0)
    batches = [torch.randn(6, 8) for _ in range(3)]
    prepared = pq.prepare_pt2e(torch.export.export(model, (batches[0],)), quantizer, **options)
    return pq.convert_pt2e(pq.calibrate(prepared, batches, progress=False)), batches


def test_comparisons_when_chosen_by_then_in_integers_throughout():
    torch.manual_seed(0)
    gm, batches = quantized(Chosen().eval(), pq.IntegerQuantizer(), int_only=True)
    assert pq.audit(gm).islands == ()
    reference = pq.integer_reference(gm)
    for x in batches:
        (values, places), (expected, expected_places) = reference(x), gm(x)
        assert torch.equal(places, expected_places)
        assert pq.sqnr_db(expected, values) > 40.0


def test_comparisons_when_trained_then_the_reference_is_the_forward():
    torch.manual_seed(0)
    x = torch.randn(6, 8)
    program = torch.export.export(Chosen().train(), (x,))
    prepared = pq.prepare_qat_pt2e(program, pq.IntegerQuantizer(), numerics="integer")
    prepared(x)[0].square().mean().backward()
    assert all(p.grad.abs().sum() > 0 for p in prepared.parameters())
    prepared.apply(disable_observer)
    expected = prepared.eval()(x)
    found = pq.integer_reference(pq.convert_pt2e(prepared))(x)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class Judging(nn.Module):
    """A comparison and places of values that its quantizer leaves float."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = torch.relu(self.first(x))
        z = self.second(y)
        return z, y > 0.2, y != 0.0, y.argmax(-1), (y * 10).to(torch.int32)


def test_audit_when_integers_are_made_of_floats_then_listed():
    gm, _ = quantized(Judging().eval(), pq.IntegerQuantizer())
    assert [operator.operator for operator in pq.audit(gm).islands] == ["aten.to"]


class Cumulative(nn.Module):
    """Comparisons and places of values without an integer form, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = torch.cumsum(self.first(x), 1)
        return self.second(y), y > 0.2, y.argmax(-1)


def test_audit_when_booleans_and_places_are_made_of_float_values_then_listed():
    gm, _ = quantized(Cumulative().eval(), get("xnnpack").quantizer("int8_minmax"))
    found = [operator.operator for operator in pq.audit(gm).islands]
    assert found == ["aten.cumsum", "aten.gt", "aten.argmax"]


@pytest.mark.parametrize(
    ("backend", "package"), [("xnnpack", "executorch"), ("onnx", "onnxruntime")]
)
def test_audit_when_a_runtime_compares_floats_then_its_artifact_lists_them(backend, package):
    pytest.importorskip(package)
    torch.manual_seed(0)
    gm, _ = quantized(Chosen().eval(), pq.IntegerQuantizer(), int_only=True)
    artifact = get(backend).lower(gm, verify=False, strict=False)
    found = {operator.operator for operator in pq.audit(artifact).islands}
    assert {"aten.gt", "aten.lt", "aten.ge", "aten.ne"} <= found


def test_int_only_when_integers_are_made_of_floats_then_prepare_refuses():
    with pytest.raises(UnsupportedError, match=r"int_only: aten.to stays float"):
        quantized(Judging().eval(), pq.IntegerQuantizer(), int_only=True)
