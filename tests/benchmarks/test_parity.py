"""Runtimes against exact integers, operator by operator: a subset of `benchmarks.parity`."""

import pytest

from benchmarks.drawn_operators import DRAWN, draw, reason_of
from benchmarks.parity import (
    OPERATORS,
    REASONS,
    RUNTIMES,
    measure,
    measure_drawn,
    unexplained,
)

EXACT = ("conv2d", "depthwise conv2d", "linear", "add", "mul", "max_pool2d", "avg_pool2d")
TABLES = ("sigmoid", "hardswish")


def test_reasons_when_listed_then_of_an_operator_and_a_runtime():
    assert all(name in OPERATORS and runtime in RUNTIMES for name, runtime in REASONS)


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["conv2d, relu", "linear", "mul"])
def test_operator_when_run_by_torch_kernels_then_equal_to_the_integers(name, backend):
    row, _ = measure(name, [backend], draws=2)
    assert row["differ"] == 0


@pytest.mark.parametrize(
    ("backend", "package"), [("xnnpack", "executorch"), ("onnx", "onnxruntime")]
)
@pytest.mark.parametrize("name", [*EXACT, *TABLES, "a CNN"])
def test_operator_when_run_by_a_runtime_then_equal_to_the_integers(name, backend, package):
    pytest.importorskip(package)
    row, qdq = measure(name, [backend], draws=2)
    assert row["differ"] == 0
    assert qdq["steps"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "package"), [("xnnpack", "executorch"), ("onnx", "onnxruntime")]
)
@pytest.mark.parametrize("name", OPERATORS)
def test_operator_when_drawn_ten_thousand_times_then_equal_or_explained(name, backend, package):
    pytest.importorskip(package)
    rows = measure(name, [backend])
    assert unexplained(rows) == []
    assert rows[0]["cases"] >= 10_000 or name == "a CNN"


RUNS = pytest.mark.parametrize(
    ("backend", "package"), [("xnnpack", "executorch"), ("onnx", "onnxruntime")]
)


def assert_equal_or_explained(found, backend):
    for part, row in found:
        if row["differ"]:
            assert reason_of(part, backend), (part, row)
            assert row["steps"] == 1, (part, row)


@RUNS
def test_geometry_when_drawn_for_every_operator_then_equal_or_a_step_with_a_reason(
    backend, package
):
    pytest.importorskip(package)
    parts = [part for name in DRAWN for part in draw(name, 1, 100)]
    assert_equal_or_explained(measure_drawn(parts, backend, has_ties=True), backend)


@pytest.mark.slow
@RUNS
@pytest.mark.parametrize("has_ties", [False, True], ids=["scales of data", "ties"])
@pytest.mark.parametrize("name", DRAWN)
def test_geometry_when_drawn_ten_thousand_times_then_equal_or_a_step_with_a_reason(
    name, has_ties, backend, package
):
    pytest.importorskip(package)
    parts = draw(name, 0, 10_000)
    assert_equal_or_explained(measure_drawn(parts, backend, has_ties=has_ties), backend)
