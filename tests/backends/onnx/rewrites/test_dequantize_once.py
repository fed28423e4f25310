"""Weights that products in float read are dequantized at load, beside others on the integers."""

import numpy as np
import pytest

ir = pytest.importorskip("onnx_ir", reason="the extra onnx is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

from pt2e_quant.backends.onnx.rewrites.dequantize_once import dequantize_once  # noqa: E402

MODEL = """<ir_version: 10, opset_import: ["" : 21]>
g (float[2, 2] x, float[2, 2] f) => (float[2, 2] a, float[2, 2] b)
<float s = {{0.05}}, uint8 z = {{100}}, int8[2, 2] w = {{1, -2, 3, 4}}, float[2] c = {{0.5, 0.25}},
 int8[2] zero = {{0, 0}}> {{
    q = QuantizeLinear(x, s, z)
    d = DequantizeLinear(q, s, z)
    w_real = DequantizeLinear <axis = 0> (w, c, zero)
    {turn}
    a = MatMul(d, {weight})
    b = MatMul(f, {weight})
}}"""


def called(model, *values):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    file = ir.to_proto(model).SerializeToString()
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return session.run(None, dict(zip(("x", "f"), values, strict=True)))


@pytest.mark.parametrize(
    ("turn", "weight"), [("", "w_real"), ("t = Transpose <perm = [1, 0]> (w_real)", "t")]
)
def test_weight_when_one_reader_is_float_then_it_gets_arithmetic_of_its_own(turn, weight):
    model = ir.from_onnx_text(MODEL.format(turn=turn, weight=weight))
    x, f = np.float32([[1, 2], [-1, 0.5]]), np.float32([[0.1, 3], [2, -2]])
    expected = called(model, x, f)
    assert dequantize_once(model.graph) == 1
    products = [node for node in model.graph if node.op_type == "MatMul"]
    sources = [product.inputs[1].producer() for product in products]
    if turn:
        sources = [source.inputs[0].producer() for source in sources]
    assert [source.op_type for source in sources] == ["DequantizeLinear", "Mul"]
    for one, other in zip(called(model, x, f), expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert dequantize_once(model.graph) == 0
