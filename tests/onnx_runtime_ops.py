"""Single operators of ONNX Runtime, whose scales and zero points are inputs."""

import functools

import pytest
import torch

LIMITS = {torch.int8: (-128, 127), torch.uint8: (0, 255), torch.int16: (-32768, 32767)}


_OPTIONS = {"QLinearGlobalAveragePool": {"channels_last": 0}, "QLinearSoftmax": {"opset": 13}}


@functools.cache
def quantized_session(operator, shapes, dtype):
    """A session of one operator; a float one has one input and no qparams."""
    onnx = pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    make, kinds = onnx.helper, onnx.TensorProto
    kind = {torch.int8: kinds.INT8, torch.uint8: kinds.UINT8, torch.int16: kinds.INT16}.get(
        dtype, kinds.FLOAT
    )
    inputs, names = [], []

    def take(name, kind, shape):
        inputs.append(make.make_tensor_value_info(name, kind, shape))
        names.append(name)

    is_real = operator in ("QuantizeLinear", "Sigmoid", "Tanh")
    for number, shape in enumerate(shapes):
        take(f"x{number}", kinds.FLOAT if is_real else kind, shape)
        if not is_real:
            take(f"scale{number}", kinds.FLOAT, [])
            take(f"zero{number}", kind, [])
    if dtype is not torch.float32:
        take("scale", kinds.FLOAT, [])
        take("zero", kind, [])
    contributed = operator.startswith("QLinear")
    options = _OPTIONS.get(operator, {})
    node = make.make_node(
        operator, names, ["y"], domain="com.microsoft" if contributed else "", **options
    )
    result = make.make_tensor_value_info("y", kind, None)
    graph = make.make_graph([node], "one", inputs, [result])
    opsets = [make.make_opsetid("", 21), make.make_opsetid("com.microsoft", 1)]
    model = make.make_model(graph, opset_imports=opsets, ir_version=10)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), settings)


def run_session(session, operands, output):
    """The result as a tensor.

    Args:
        session: of `quantized_session`.
        operands: pairs of a tensor and its qparams, or None for a float one.
        output: the qparams of the result, None if it is float.
    """
    given = []
    for value, qparams in operands:
        given.append(value.numpy())
        given += [] if qparams is None else _numbers(qparams)
    given += [] if output is None else _numbers(output)
    names = [each.name for each in session.get_inputs()]
    (made,) = session.run(None, dict(zip(names, given, strict=True)))
    return torch.from_numpy(made)


def _numbers(qparams):
    zero = torch.tensor(qparams.zero_point_int, dtype=qparams.dtype)
    return [qparams.scale.float().reshape(()).numpy(), zero.numpy()]
