import pytest
import torch
from torch import nn

from pt2e_quant.core.errors import ConfigError, InputError
from pt2e_quant.tensors.kernels import choose_fastest as unit
from pt2e_quant.tensors.quantized_tensor import QuantizedTensor


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)
    )


X = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))


def pretend(monkeypatch, fastest):
    """Times by what the weight is, so that the choice does not hang on this machine."""

    def timed(x, weight, bias):
        if not isinstance(weight, QuantizedTensor):
            return 10e-6
        return (5e-6 if weight.form.input is None else 20e-6) if fastest == "w8" else 30e-6

    monkeypatch.setattr(unit, "_time", timed)


def test_linears_when_a_candidate_is_fastest_then_they_get_it(monkeypatch, capsys):
    pretend(monkeypatch, "w8")
    net = model()
    report = unit.auto_quantize(net, (X,))
    assert [choice.chosen.scheme for choice in report.choices] == ["w8", "w8", "w8"]
    assert all(isinstance(net[i].weight, QuantizedTensor) for i in (0, 2, 4))
    assert "5 us, float 10 us" in capsys.readouterr().out
    assert [t.scheme for t in report.choices[0].trials] == ["w8", "float", "int8_dynamic"]


def test_linears_when_float_is_fastest_then_they_stay_and_the_report_says_so(monkeypatch):
    pretend(monkeypatch, "float")
    net = model()
    report = unit.auto_quantize(net, X, verbose=False)
    assert all(type(net[i].weight) is nn.Parameter for i in (0, 2, 4))
    assert "float is fastest, 10 us; w8 30 us" in str(report)


def test_linears_when_a_candidate_is_too_far_from_float_then_it_is_not_chosen(monkeypatch):
    pretend(monkeypatch, "w8")
    report = unit.auto_quantize(model(), X, candidates=["w2"], verbose=False)
    assert {choice.chosen.scheme for choice in report.choices} == {"float"}


def test_times_when_kept_in_a_file_then_are_not_measured_again(monkeypatch, tmp_path):
    pretend(monkeypatch, "w8")
    path = tmp_path / "times.json"
    first = unit.auto_quantize(model(), X, cache=path, verbose=False)
    # The second linear has the first one's shape.
    assert [choice.is_cached for choice in first.choices] == [False, True, False]
    monkeypatch.setattr(unit, "_time", lambda *_: pytest.fail("measured"))
    net = model()
    again = unit.auto_quantize(net, X, cache=path, verbose=False)
    assert all(choice.is_cached for choice in again.choices)
    assert isinstance(net[4].weight, QuantizedTensor)


def test_linears_when_really_measured_then_every_trial_has_a_time():
    report = unit.auto_quantize(model(), X, verbose=False)
    assert all(trial.time_us > 0 for choice in report.choices for trial in choice.trials)


def test_auto_quantize_when_nothing_fits_then_refused():
    with pytest.raises(InputError, match="reach no linear"):
        unit.auto_quantize(nn.ReLU(), X)
    with pytest.raises(ConfigError, match='"int8" needs calibration data'):
        unit.auto_quantize(model(), X, candidates=["int8"])
