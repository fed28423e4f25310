"""Sigmoid, silu and tanh in float32, to the last bit those of ONNX Runtime on x86-64."""

import platform

import pytest
import torch

from pt2e_quant.core.integer_ops import tables as rational
from tests.onnx_runtime_ops import quantized_session, run_session

X = torch.cat(
    [torch.randn(3000, generator=torch.Generator().manual_seed(0)) * s for s in (0.1, 1, 4, 25)]
)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other kernels on other CPUs")
@pytest.mark.parametrize(
    ("operator", "function"), [("Sigmoid", rational.logistic), ("Tanh", rational.tanh)]
)
def test_function_when_10_000_values_then_the_bits_of_onnx_runtime(operator, function):
    session = quantized_session(operator, ((X.numel(),),), torch.float32)
    assert torch.equal(run_session(session, [(X, None)], None), function(X))


@pytest.mark.parametrize(
    ("function", "real"),
    [
        (rational.logistic, torch.sigmoid),
        (rational.tanh, torch.tanh),
        (rational.silu, torch.nn.functional.silu),
    ],
)
def test_function_when_compared_with_the_real_one_then_within_float32_rounding(function, real):
    expected = real(X.double())
    error = (function(X).double() - expected).abs()
    assert float((error / X.abs().clamp(min=1.0)).max()) <= 4e-7
    assert torch.equal(function(torch.zeros(1)), real(torch.zeros(1)))
