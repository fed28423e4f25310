import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pt2e_quant.core.errors import CalibrationError, ConfigError
from pt2e_quant.core.schemes import INT8_ACTIVATION
from pt2e_quant.tensors.function_ranges import FunctionRanges, install_functions
from pt2e_quant.tensors.plan import as_scheme


def forward(x):
    return torch.cat([torch.log(x.abs() + 1), F.elu(x), torch.sigmoid(x), torch.log(x.exp())], -1)


def calibrated(*batches):
    ranges = FunctionRanges(INT8_ACTIVATION)
    for batch in batches:
        with ranges.watching():
            forward(batch)
    ranges.choose()
    return ranges


def test_functions_when_calibrated_then_each_call_has_its_range():
    ranges = calibrated(torch.tensor([-3.0, 1.0]), torch.tensor([0.5, 7.0]))
    assert ranges.seen["log_1"] == (-3.0, 7.0)
    assert ranges.seen["elu_0"] == (pytest.approx(-0.9502, abs=1e-3), 7.0)
    assert {"log_0", "cat_0", "add_0", "exp_0"} <= set(ranges.seen)


def test_functions_when_bounded_then_range_is_that_of_the_definition():
    ranges = calibrated(torch.tensor([0.0, 0.1]))
    assert ranges.seen["sigmoid_0"] == (0.0, 1.0)
    scale, zero_point = ranges.qparams["sigmoid_0"]
    assert (scale, zero_point) == (pytest.approx(1 / 255), -128)


def test_functions_when_installed_then_results_are_on_the_grid():
    class Model(nn.Module):
        def forward(self, x):
            return forward(x)

    model, x = Model(), torch.linspace(-2, 2, 9)
    expected = model(x)
    ranges = calibrated(x)
    install_functions(model, ranges)
    found = model(x)
    scale, _ = ranges.qparams["cat_0"]
    assert torch.allclose(found / scale, (found / scale).round(), atol=1e-3)
    assert (found - expected).abs().max() < 0.1
    with pytest.raises(Exception, match="counts the calls"):
        torch.compile(model, fullgraph=True, backend="eager")(x)


def test_functions_when_a_result_is_not_finite_then_refused_by_name():
    mode = FunctionRanges(INT8_ACTIVATION).watching()
    with mode, pytest.raises(CalibrationError, match=r"the result of log \(call log_0\)"):
        torch.log(torch.zeros(3))


def test_functions_when_the_scheme_has_no_static_output_then_refused():
    with pytest.raises(ConfigError, match="there is none"):
        FunctionRanges.of(nn.Identity(), as_scheme("w8"))
    with pytest.raises(ConfigError, match="static integers"):
        FunctionRanges(as_scheme("int8_dynamic").input)
