import math

import pytest
import torch
import typer
from torch import nn

import pt2e_quant as pq
from pt2e_quant.__main__ import main
from pt2e_quant.command_line.fail_under import check_figure, check_report, decibels
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.provenance import Provenance
from pt2e_quant.flow.report.report import Report


def call(*arguments):
    """The exit status of a command."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return caught.value.code or 0


def test_check_figure_when_below_or_no_number_then_exits_with_one(capsys):
    check_figure(1.0, 1.0, "it")
    check_figure(0.5, None, "it")
    for figure in (0.5, math.nan):
        with pytest.raises(typer.Exit) as caught:
            check_figure(figure, 1.0, "it")
        assert caught.value.exit_code == 1
    assert "it is 0.5, below --fail-under 1" in capsys.readouterr().err


def test_check_report_when_no_figure_is_known_then_only_a_bound_is_refused():
    report = Report(backend="plain", provenance=Provenance())
    check_report(report, None)
    with pytest.raises(ConfigError, match="pt2e-quant compare"):
        check_report(report, 20.0)
    report.sqnr_float_db = 25.0
    check_report(report, 20.0)
    with pytest.raises(typer.Exit):
        check_report(report, 26.0)


def test_decibels_when_nothing_is_lost_then_infinite():
    assert decibels(0.0) == math.inf
    assert decibels(0.1) == pytest.approx(10)


@pytest.fixture(scope="module")
def ready():
    """An .onnx of a model with the sizes of the one in `folder`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    batches = [torch.randn(4, 4) for _ in range(2)]
    return pq.quantize(model, (batches[0],), calibration_data=batches, backend="onnx")


def test_quantize_when_its_figure_is_below_fail_under_then_exits_with_one(
    folder, plain_backend, capsys
):
    asked = ("quantize", "model.pt2", "--backend", "plain", "--calibration-data", "data.npz", "-q")
    assert call(*asked, "--fail-under", "10", "-o", "good.plain") == 0
    assert call(*asked, "--fail-under", "90", "-o", "poor.plain") == 1
    assert "SQNR against the float model in dB is" in capsys.readouterr().err
    assert (folder / "poor.plain").exists()


SENSITIVITY = ("sensitivity", "model.pt2", "--inputs", "data.npz", "--backend", "onnx")


@pytest.mark.parametrize(
    ("asked", "low", "high", "name"),
    [
        (("report", "ready.onnx", "-o", "page.html"), "10", "90", "SQNR against the float"),
        (("inspect", "ready.onnx"), "10", "90", "SQNR against the float"),
        (("audit", "ready.onnx"), "0.5", "1.1", "share of operators in integers"),
        (("bench", "ready.onnx", "--against", "model.pt2"), "0.0001", "10000", "speed-up"),
        (("profile", "ready.onnx", "--inputs", "data.npz"), "0.0001", "1", "time in integers"),
        (SENSITIVITY, "10", "90", "SQNR with the worst group"),
    ],
    ids=["report", "inspect", "audit", "bench", "profile", "sensitivity"],
)
def test_command_when_its_figure_is_below_fail_under_then_exits_with_one(
    folder, ready, capsys, asked, low, high, name
):
    ready.save(folder / "ready.onnx")
    assert call(*asked, "--fail-under", low, "--json") == 0
    capsys.readouterr()
    assert call(*asked, "--fail-under", high, "--json") == 1
    out, err = capsys.readouterr()
    assert f"below --fail-under {high}" in err
    assert name in err
    assert out.startswith("{")
