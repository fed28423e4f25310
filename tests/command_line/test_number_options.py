"""Numbers that options take: a wrong one is wrong usage, before any work."""

import pytest
import typer

from pt2e_quant.__main__ import main
from pt2e_quant.command_line.number_options import cosine, finite, positive, read_max_sizes

QUANTIZE = ("quantize", "gone.pt2", "--backend", "onnx")
TUNE = ("tune", "gone.pt2", "--backend", "onnx", "--calibration-data", "gone.npz")
SENSITIVITY = ("sensitivity", "gone.pt2", "--backend", "onnx", "--inputs", "gone.npz")
COMPARE = ("compare", "gone.onnx", "--against", "gone.pt2", "--inputs", "gone.npz")
BENCH = ("bench", "gone.onnx", "--against", "gone.pt2")
PROFILE = ("profile", "gone.onnx", "--inputs", "gone.npz")
REPORT = ("report", "gone.onnx", "-o", "page.html")
JUDGED = {
    command[0]: command
    for command in (
        *(QUANTIZE, TUNE, SENSITIVITY, COMPARE, BENCH, PROFILE, REPORT),
        *(("inspect", "gone.onnx"), ("audit", "gone.onnx")),
    )
}


def check_usage(capsys, arguments, option):
    """A command ends with 2 and no output, before it looks for its files."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    out, err = capsys.readouterr()
    assert caught.value.code == 2, err
    assert not out
    assert f"Invalid value for '{option}'" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("command", JUDGED)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "much"])
def test_fail_under_when_not_finite_then_wrong_usage(capsys, command, value):
    check_usage(capsys, (*JUDGED[command], f"--fail-under={value}"), "--fail-under")


@pytest.mark.parametrize(
    ("command", "option", "values"),
    [
        (QUANTIZE, "--margin-db", ("nan", "inf")),
        (QUANTIZE, "--batch-size", ("nan", "-1", "0")),
        (QUANTIZE, "--max-batches", ("inf", "-1", "0")),
        (QUANTIZE, "--max-sizes", ("x:0=nan", "x:0=-4", "x:0=0", "x")),
        (TUNE, "--target", ("nan", "inf", "-0.5", "0", "1.5")),
        (TUNE, "--budget-bytes", ("nan", "inf", "-1", "0")),
        (TUNE, "--budget-bits", ("nan", "inf", "-1", "0")),
        (TUNE, "--budget-latency-us", ("nan", "inf", "-1", "0")),
        (TUNE, "--points", ("nan", "-1")),
        (BENCH, "--threads", ("nan", "0", "-1")),
        (BENCH, "--rounds", ("inf", "0", "-1")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_option_when_its_number_makes_no_sense_then_wrong_usage(capsys, command, option, values):
    for value in values:
        check_usage(capsys, (*command, f"{option}={value}"), option)


def test_checks_when_a_number_makes_sense_then_returned():
    assert [finite(None), finite(-3.0), positive(None), positive(2.5)] == [None, -3.0, None, 2.5]
    assert [cosine(None), cosine(0.999), cosine(1.0)] == [None, 0.999, 1.0]
    assert read_max_sizes(["z.q:1=8"]) == {"z.q": {1: 8}}
    with pytest.raises(typer.BadParameter):
        positive(0.0)
