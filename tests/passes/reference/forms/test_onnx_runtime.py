"""Forms with ONNX Runtime's profile against its own operators on 10,000 cases each.

Ratios of scales are fractions of small numbers, so that sums and products lie on ties; zero points
are the limits of their dtype as often as not.
"""

import numpy as np
import pytest
import torch

from pt2e_quant.core.integer_ops.calls import compute
from pt2e_quant.core.integer_ops.profiles import PROFILES, Quantization
from pt2e_quant.core.integer_ops.quantize import quantize
from pt2e_quant.core.integer_ops.requantize import output_range
from pt2e_quant.core.qparams import QParams
from pt2e_quant.passes.reference.forms.functions import TABLE
from pt2e_quant.passes.reference.forms.registry import FORMS
from pt2e_quant.passes.reference.forms.site import Arithmetic, Operand, Output, computed
from tests.onnx_runtime_ops import LIMITS, quantized_session, run_session

aten = torch.ops.aten
ARITHMETIC = Arithmetic(PROFILES["onnxruntime_x86"])
DRAWS = 25
PAIRS = {
    "one shape": ((20, 20), (20, 20)),
    "rows of odd length": ((13, 31), (13, 31)),
    "gate": ((1, 16, 5, 5), (1, 16, 1, 1)),
    "gate first": ((1, 16, 1, 1), (1, 16, 5, 5)),
    "gate first, sizes of 1 behind": ((16, 1, 1), (16, 25, 1)),
    "one number first": ((1,), (400,)),
    "column and row": ((20, 1), (1, 20)),
    "row first": ((20,), (20, 20)),
}


class Draw:
    """Integers with qparams, the same for both."""

    def __init__(self, seed, dtype):
        self.generator = np.random.default_rng(seed)
        self.dtype = dtype

    def qparams(self, scale):
        low, high = LIMITS[self.dtype]
        zero = self.generator.choice([low, high, self.generator.integers(low, high + 1)])
        return QParams.per_tensor(float(np.float32(scale)), int(zero), low, high, self.dtype)

    def operand(self, shape, scale):
        low, high = LIMITS[self.dtype]
        values = torch.from_numpy(self.generator.integers(low, high + 1, shape)).to(self.dtype)
        return Operand(value=values, like=values, qparams=self.qparams(scale))

    def fraction(self):
        return self.generator.integers(1, 30) / (2 * self.generator.integers(2, 40))

    def output(self, scale):
        qparams = self.qparams(scale)
        return Output(qparams=qparams, range=output_range(qparams, self.dtype))


def apart(operator, target, arguments, output):
    """How many values of ONNX Runtime's operator differ from the form's."""
    operands = [v for v in arguments.values() if isinstance(v, Operand)]
    form = next((form for form in FORMS if target in form.operators), TABLE)
    expected = computed(form, target, arguments, output, ARITHMETIC)
    shapes = tuple(tuple(v.value.shape) for v in operands)
    session = quantized_session(operator, shapes, torch.uint8)
    given = [as_byte(v.value, v.qparams) for v in operands]
    if target is aten.sub.Tensor:  # the file has the complement of what is subtracted
        y, qparams = given[1]
        zero = 255 - qparams.zero_point_int
        given[1] = 255 - y, QParams.per_tensor(qparams.scale_float, zero, 0, 255, torch.uint8)
    found = run_session(session, given, as_byte(expected, output.qparams)[1])
    return int((found != as_byte(expected, output.qparams)[0]).sum())


def as_byte(values, qparams):
    """In uint8, as the file has it."""
    offset = -LIMITS[values.dtype][0]
    zero = qparams.zero_point_int + offset
    byte = QParams.per_tensor(qparams.scale_float, zero, 0, 255, torch.uint8)
    return (values.int() + offset).to(torch.uint8), byte


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(
    ("operator", "target"),
    [
        ("QLinearAdd", aten.add.Tensor),
        ("QLinearAdd", aten.sub.Tensor),
        ("QLinearMul", aten.mul.Tensor),
    ],
)
def test_pair_when_10_000_cases_lie_near_ties_then_as_onnx_runtime(operator, target, pair, dtype):
    draw, shapes = Draw(0, dtype), PAIRS[pair]
    for _ in range(DRAWS):
        unit = 2.0 ** draw.generator.uniform(-6, 2)
        output = draw.output(unit)
        step = 1.0 if operator == "QLinearMul" else unit
        x = draw.operand(shapes[0], draw.fraction() * unit)
        y = draw.operand(shapes[1], draw.fraction() * step)
        arguments = {"self": x, "other": y}
        if operator == "QLinearAdd":
            arguments["alpha"] = 1
        assert apart(operator, target, arguments, output) == 0


def test_average_when_10_000_cases_then_as_onnx_runtime():
    draw = Draw(1, torch.uint8)
    for _ in range(DRAWS):
        x = draw.operand((4, 100, 3, 5), draw.fraction())
        arguments = {"self": x, "output_size": [1, 1]}
        target = aten.adaptive_avg_pool2d.default
        assert apart("QLinearGlobalAveragePool", target, arguments, draw.output(0.25)) == 0


def test_sigmoid_when_10_000_entries_then_as_onnx_runtime():
    draw = Draw(2, torch.int8)
    every = torch.arange(-128, 128).to(torch.int8)
    for _ in range(40):
        scale = 2.0 ** draw.generator.uniform(-8, -1)
        x = Operand(value=every, like=every, qparams=draw.qparams(scale))
        output = draw.output(2.0 ** draw.generator.uniform(-9, -7))
        assert apart("QLinearSigmoid", aten.sigmoid.default, {"self": x}, output) == 0


def test_softmax_when_10_000_values_then_as_onnx_runtime():
    draw = Draw(4, torch.int8)
    for _ in range(20):
        x = draw.operand((20, 25), 2.0 ** draw.generator.uniform(-8, -3))
        scale = float(np.float32(2.0 ** draw.generator.uniform(-10, -6)))
        qparams = QParams.per_tensor(scale, -128, -128, 127, torch.int8)
        output = Output(qparams=qparams, range=output_range(qparams, torch.int8))
        arguments = {"self": x, "dim": -1}
        assert apart("QLinearSoftmax", aten.softmax.int, arguments, output) == 0


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16], ids=str)
def test_quantize_when_10_000_values_lie_near_ties_then_as_onnx_runtime(dtype):
    draw = Draw(3, dtype)
    differs_by_inverse = 0
    for _ in range(40):
        scale = 2.0 ** draw.generator.uniform(-6, 2)
        qparams = draw.qparams(scale)
        near = (draw.generator.integers(-300, 300, 400) + 0.5) * qparams.scale_float
        x = torch.from_numpy(near.astype(np.float32))
        session = quantized_session("QuantizeLinear", ((400,),), dtype)
        found = run_session(session, [(x, None)], qparams)
        limits = {"limits": LIMITS[dtype], "storage": dtype}
        zero = qparams.zero_point_int
        by = Quantization.DIVIDED
        expected = quantize(compute, x, qparams.scale_float, zero, **limits, by=by)
        assert torch.equal(found, expected)
        inverse = quantize(compute, x, 1.0 / qparams.scale_float, zero, **limits)
        differs_by_inverse += int((inverse != found).sum())
    assert differs_by_inverse > 0
