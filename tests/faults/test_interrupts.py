"""An interrupt (Ctrl-C) in any step: nothing half-written, and the step done again is right."""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch._export.utils as export_utils

import pt2e_quant as pq
from pt2e_quant.core.errors import ConfigError
from tests.faults.conftest import call, calls, equal, exported, target_of

PACKAGE = str(Path(pq.__file__).parent)
POINTS = (0.02, 0.4, 0.9)
"""Where in a step it is interrupted, as a part of its calls of this project's functions."""


class Calls:
    """Counts calls of this project's functions; raises at one of them.

    Generators are not counted: Python also enters one to close it when it is collected, and drops
    what is raised there. For the same reason nothing is raised within a finalizer.
    """

    def __init__(self, last: int | None) -> None:
        self.count, self.last, self.has_raised = 0, last, False

    def __call__(self, frame, event, arg) -> None:
        code = frame.f_code
        if event != "call" or code.co_flags & inspect.CO_GENERATOR:
            return
        if not code.co_filename.startswith(PACKAGE):
            return
        self.count += 1
        if self.last is None or self.count < self.last or self.has_raised or finalizes(frame):
            return
        self.has_raised = True
        raise KeyboardInterrupt


def finalizes(frame) -> bool:
    """Whether a frame runs within a `__del__`."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


@contextmanager
def counted(last: int | None = None) -> Iterator[Calls]:
    calls_seen = Calls(last)
    before = sys.getprofile()
    sys.setprofile(calls_seen)
    try:
        yield calls_seen
    finally:
        sys.setprofile(before)


def interrupt(step, count: int, point: float) -> None:
    """Run a step of so many calls up to a point of it."""
    before = kernels_of_torch()
    with pytest.raises(KeyboardInterrupt), counted(max(1, int(count * point))):
        step()
    assert kernels_of_torch() == before


def kernels_of_torch():
    """What Python code has given torch's operators: an export gives and takes some away."""
    return {op: dict(op.py_kernels) for op in export_utils._collect_all_valid_cia_ops()}


def prepared(backend):
    return pq.prepare_pt2e(exported(), target_of(backend).quantizer("int8"))


@pytest.mark.parametrize("point", POINTS)
def test_calibrate_when_interrupted_then_calibrating_anew_is_right(backend, point):
    expected = pq.calibrate(prepared(backend), calls(4), progress=False)
    measured, broken, batches = prepared(backend), prepared(backend), calls(4)
    with counted() as seen:
        pq.calibrate(measured, batches, progress=False)
    before = {name: value.clone() for name, value in exported().state_dict.items()}
    interrupt(lambda: pq.calibrate(broken, batches, progress=False), seen.count, point)
    for name, value in before.items():
        assert torch.equal(dict(broken.named_parameters())[name], value)
    with torch.no_grad():
        assert equal(broken(*call()), expected(*call()))
    # What was seen before the interrupt stays seen; the same data adds nothing to the ranges.
    again = pq.convert_pt2e(pq.calibrate(broken, calls(4), progress=False))
    with torch.no_grad():
        found = again(*call())["logits"]
        assert pq.sqnr_db(pq.convert_pt2e(expected)(*call())["logits"], found) > 30


@pytest.mark.parametrize("point", POINTS[1:])
def test_convert_when_interrupted_then_the_graph_says_so(plain_backend, point):
    ready = [
        pq.calibrate(
            pq.prepare_pt2e(exported(), plain_backend.quantizer()), calls(2), progress=False
        )
        for _ in range(2)
    ]
    with counted() as seen:
        pq.convert_pt2e(ready[0])
    interrupt(lambda: pq.convert_pt2e(ready[1]), seen.count, point)
    for step in (pq.convert_pt2e, lambda gm: pq.calibrate(gm, calls(1))):
        with pytest.raises(ConfigError, match="stopped half way"):
            step(ready[1])


@pytest.mark.parametrize("point", [pytest.param(POINTS[0], marks=pytest.mark.slow), *POINTS[1:]])
def test_lower_when_interrupted_then_lowering_again_is_right(backend, point):
    target = target_of(backend)
    gm = pq.convert_pt2e(pq.calibrate(prepared(backend), calls(4), progress=False))
    with torch.no_grad():
        graph = gm(*call())
    expected = target.lower(gm)
    with counted() as seen:  # a second time: the first fills caches
        target.lower(gm)
    interrupt(lambda: target.lower(gm), seen.count, point)
    with torch.no_grad():
        assert equal(gm(*call()), graph)
    assert equal(target.lower(gm).run(*call()), expected.run(*call()))


@pytest.mark.parametrize("point", POINTS)
def test_save_when_interrupted_then_the_file_is_as_before(artifact, backend, point, tmp_path):
    path = tmp_path / f"model{target_of(backend).suffix}"
    path.write_bytes(b"what was here")
    with counted() as seen:
        artifact.save(tmp_path / f"other{path.suffix}")
    (tmp_path / f"other{path.suffix}").unlink()
    interrupt(lambda: artifact.save(path), seen.count, point)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == b"what was here"
    artifact.save(path)
    assert equal(target_of(backend).load(path).run(*call()), artifact.run(*call()))


def test_quantize_when_the_data_interrupts_then_the_model_is_as_before(backend):
    from tests.faults.conftest import TwoInputs

    def data():
        yield call()
        raise KeyboardInterrupt

    model = TwoInputs().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    target = target_of(backend)
    with pytest.raises(KeyboardInterrupt):
        pq.quantize(model, call(), calibration_data=data(), backend=target)
    assert model.training
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())
    assert pq.quantize(model, call(), calibration_data=calls(2), backend=target).run(*call())
