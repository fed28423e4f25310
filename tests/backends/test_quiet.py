"""What a process prints that imports a backend, or quantizes with it: nothing of other packages."""

import logging
import os
import subprocess
import sys
import warnings

import pytest

from pt2e_quant.backends import get
from pt2e_quant.backends.quiet import without_remarks, without_stderr
from pt2e_quant.core.errors import MissingExtraError

IMPORT = """
import pt2e_quant as pq
pq.backends.get({name!r}).require_extra()
"""
QUANTIZE = """
import sys, torch
from torch import nn
import pt2e_quant as pq
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)).eval()
x = torch.randn(2, 3, 8, 8)
backend = pq.backends.get({name!r})
options = dict(allow_unmeasured=True) if {name!r} == "cuda" else dict()
if {name!r} == "cpu":
    backend = backend.allowing_slower()
prepared = pq.prepare(torch.export.export(model, (x,)), backend.quantizer())
quantized = pq.convert(pq.calibrate(prepared, [(x,)]))
artifact = backend.lower(quantized, **options)
artifact.run(x)
artifact.save(sys.argv[1])
backend.load(sys.argv[1]).run(x)
"""


@pytest.fixture(params=["xnnpack", "onnx", "cpu", "cuda"])
def name(request):
    try:
        get(request.param).require_extra()
    except MissingExtraError as error:
        pytest.skip(str(error))
    return request.param


@pytest.fixture
def printed(name, tmp_path):
    """What a program prints with Python's default warnings shown."""

    def run(code):
        path = tmp_path / f"artifact{get(name).suffix}"
        command = [sys.executable, "-W", "default", "-c", code.format(name=name), str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    return run


def test_a_backend_when_imported_then_nothing_is_printed(printed):
    assert printed(IMPORT) == ""


def test_a_backend_when_it_quantizes_then_nothing_of_others_is_printed(printed):
    assert printed(QUANTIZE) == ""


def test_without_remarks_when_left_then_levels_and_filters_are_as_before(caplog):
    logger = logging.getLogger("pt2e_quant_tests.remarks")
    with without_remarks(logger.name):
        logger.warning("not shown")
        warnings.warn("not shown", stacklevel=1)
        logger.error("shown")
    assert caplog.messages == ["shown"]
    assert logger.level == logging.NOTSET
    with pytest.warns(UserWarning, match="shown"):
        warnings.warn("shown", stacklevel=1)


def test_without_stderr_when_an_error_leaves_it_then_stderr_is_heard_again(capfd):
    with pytest.raises(KeyError), without_stderr():  # noqa: PT012
        os.write(2, b"lost")
        raise KeyError
    os.write(2, b"heard")
    assert capfd.readouterr().err == "heard"
