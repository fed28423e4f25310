"""Functions and means in ONNX are as exact as torch's, also of inputs that would overflow."""

import io

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
import onnx
import onnxruntime

from pt2e_quant.backends.onnx.translate.translations import translation_table
from tests.call_function import Call

FAR = torch.logspace(-8, 4, 200)
X = torch.cat([torch.linspace(-30, 30, 1000), FAR, -FAR])
SLOPES = torch.linspace(-0.5, 1.5, 5)
FUNCTIONS = {
    "mish": F.mish,
    "softplus": F.softplus,
    "softplus of beta": lambda x: F.softplus(x, 3.0),
    "prelu": lambda x: F.prelu(x, SLOPES[:1]),
    "prelu of channels": lambda x: F.prelu(x, SLOPES),
}
REMOVED = {"Mish", "Softplus", "PRelu", "Tanh"}


def exported(function, x):
    """The model, in torch's export with our translations alone."""
    program = torch.export.export(Call(function), (x,))
    made = torch.onnx.export(
        program, custom_translation_table=translation_table(), opset_version=21, verbose=False
    )
    file = io.BytesIO()
    made.save(file)
    return file.getvalue()


@pytest.mark.parametrize("shape", [(-1, 5), (-1, 5, 8), (5, 5, 7, 8)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_activation_when_translated_then_as_exact_as_torch(name, shape):
    x = X.view(shape)
    model = exported(FUNCTIONS[name], x)
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert not REMOVED & {node.op_type for node in onnx.load_from_string(model).graph.node}
    torch.testing.assert_close(torch.from_numpy(found), FUNCTIONS[name](x), rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize(
    ("shape", "is_product"),
    [((1, 40, 6), True), ((1, 8, 5, 7), True), ((2, 40, 6), False), ((1, 3, 8, 5, 7), False)],
)
def test_mean_of_rows_when_of_one_matrix_then_a_product(shape, is_product, keepdim):
    x = torch.randn(shape)
    model = exported(lambda x: x.mean(1, keepdim=keepdim), x)
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    types = {node.op_type for node in onnx.load_from_string(model).graph.node}
    assert ("MatMul" in types, "ReduceMean" in types) == (is_product, not is_product)
    torch.testing.assert_close(torch.from_numpy(found), x.mean(1, keepdim=keepdim))
