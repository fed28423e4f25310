"""Runtimes against exact integers, operator by operator: a subset of `benchmarks.parity`."""

import pytest

from benchmarks.parity import OPERATORS, REASONS, RUNTIMES, measure, unexplained

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
