"""Reshapes that change nothing go, and two of them become one, where that is sure."""

import numpy as np
import pytest

pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

import onnx_ir as ir
import onnxruntime

from pt2e_quant.backends.onnx.rewrites.pipeline import drop_reshapes, join_reshapes

HEADER = '<ir_version: 10, opset_import: ["" : 21]>'


@pytest.mark.parametrize(
    ("shape", "sizes", "fired"),
    [
        ("0, 2, -1", ("N", 2, 6), 1),
        ("-1, 2, 6", ("N", 2, 6), 1),
        ("-1, 6, 2", ("N", 6, 2), 0),
        ("-1, 2, 6", (None, 2, 6), 0),
        ("-1, 2, 6", None, 0),
    ],
)
def test_drop_reshapes_when_sizes_are_known_to_stay_then_it_goes(shape, sizes, fired):
    model = ir.from_onnx_text(
        f"{HEADER} g (float[N,2,6] x) => (float[N,A,B] y) <int64[3] shape = {{{shape}}}>\n"
        "{ r = Reshape(x, shape)\n y = Relu(r) }"
    )
    model.graph[0].outputs[0].shape = None if sizes is None else ir.Shape(sizes)
    before = first_result(model)
    assert drop_reshapes(model.graph) == fired
    assert drop_reshapes(model.graph) == 0
    assert sum(node.op_type == "Reshape" for node in model.graph) == 1 - fired
    np.testing.assert_array_equal(before, first_result(model))


def test_drop_reshapes_when_it_gives_a_result_then_it_stays():
    model = ir.from_onnx_text(
        f"{HEADER} g (float[N,2,6] x) => (float[N,2,6] y) <int64[3] shape = {{0, 2, 6}}>\n"
        "{ y = Reshape(x, shape) }"
    )
    assert drop_reshapes(model.graph) == 0


@pytest.mark.parametrize(
    ("second", "extra", "fired", "left"),
    [
        ("-1, 3, 4", "", 1, 1),
        ("2, -1, 3", "", 1, 1),
        ("0, 2, 2", "", 0, 2),
        ("-1, 3, 4", "z = Relu(r)\n", 1, 2),
        ("-1, 3, 4", "r2 = Relu(r)\n", 0, 1),
    ],
)
def test_join_reshapes_when_the_second_says_all_sizes_then_one_is_left(second, extra, fired, left):
    is_between = extra.startswith("r2")
    results = "float[A,B,C] y" + (", float[D,E] z" if extra.startswith("z") else "")
    model = ir.from_onnx_text(
        f"{HEADER} g (float[N,2,6] x) => ({results}) "
        f"<int64[2] one = {{-1, 4}}, int64[3] two = {{{second}}}>\n"
        f"{{ r = Reshape(x, one)\n {extra} y = Reshape({'r2' if is_between else 'r'}, two) }}"
    )
    before = first_result(model)
    assert join_reshapes(model.graph) == fired
    assert join_reshapes(model.graph) == 0
    assert sum(node.op_type == "Reshape" for node in model.graph) == left + is_between
    np.testing.assert_array_equal(before, first_result(model))


def first_result(model: ir.Model) -> np.ndarray:
    """The first result of ONNX Runtime, unoptimized, for three rows."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options)
    x = np.random.default_rng(0).normal(size=(3, 2, 6)).astype(np.float32)
    found: np.ndarray = session.run(None, {"x": x})[0]
    return found
