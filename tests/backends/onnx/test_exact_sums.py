"""Products of 8 bits on CPUs without VNNI."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import pt2e_quant as pq
from pt2e_quant.backends.onnx import exact_sums
from pt2e_quant.backends.onnx.exact_sums import runs_exactly, sums_are_exact, write_exactly
from pt2e_quant.core.pair_sums import MOST, fitted, greatest_pairs

DRAWN = ("conv", "matmul", "gemm", "integers")


def product(kind: str, seed: int, *, fits: bool, signed: bool = False):
    """A quantized product with its input and the result of exact sums, in steps of the input."""
    draw = np.random.default_rng(seed)
    inside = int(draw.integers(1, 40))
    groups = int(draw.choice([1, 1, 2])) if kind == "conv" else 1
    shape = (int(draw.integers(1, 20)), inside)
    rows = (int(draw.integers(1, 20)), inside)
    step = 1.0
    if kind == "conv":
        shape = (1, inside * groups, *(int(n) for n in draw.integers(3, 8, 2)))
        rows = (int(draw.integers(1, 12)) * groups, inside, 3, 3)
    weight = torch.from_numpy(draw.integers(-127, 128, rows)).int()
    weight = (fitted(weight) if fits else weight).numpy().astype(np.int8)
    # Every second activation is the largest one.
    x = np.where(draw.random(shape) < 0.5, 255, draw.integers(0, 256, shape)).astype(np.float32)
    real = torch.from_numpy(x).double(), torch.from_numpy(weight).double()
    if kind == "conv":
        expected = nn.functional.conv2d(*real, groups=groups)
        # A convolution is fused where its result is quantized, to a step more or less.
        step = float(expected.abs().max()) / 127
        expected = (expected / step).round()
        lines = (
            f"c = Conv <group = {groups}> (xd, wd)\n yq = QuantizeLinear (c, ys, yz)\n"
            " y = Cast <to = 1> (yq)"
        )
        extra = "wd"
    else:
        expected = real[0] @ real[1].T
        lines = {
            "matmul": "t = Transpose <perm = [1, 0]> (wd)\n y = MatMul (xd, t)",
            "gemm": "y = Gemm <transB = 1> (xd, wd)",
            "integers": (
                "t = Transpose <perm = [1, 0]> (w)\n i = MatMulInteger (xq, t, xz)\n"
                " y = Cast <to = 1> (i)"
            ),
        }[kind]
        extra = "" if kind == "integers" else "wd"
    byte = "int8" if signed else "uint8"
    if extra:
        lines = f"wd = DequantizeLinear <axis = 0> (w, ws, wz)\n {lines}"
    model = onnx.parser.parse_model(
        f"""<ir_version: 9, opset_import: ["" : 21]>
        g (float[{", ".join(map(str, shape))}] x) => (float y)
        <float xs = {{1}}, {byte} xz = {{{-128 if signed else 0}}}, float ys = {{{step}}},
         {byte} yz = {{{0 if signed else 128}}}>
        {{ xq = QuantizeLinear (x, xs, xz)
           xd = DequantizeLinear (xq, xs, xz)
           {lines} }}"""
    )
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    for name, value in (
        ("w", weight),
        ("ws", np.ones(rows[0], np.float32)),
        ("wz", np.zeros(rows[0], np.int8)),
    ):
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    return model, x, expected + (128.0 if kind == "conv" and not signed else 0.0)


def opened(model: onnx.ModelProto):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def apart(found: np.ndarray, expected: torch.Tensor) -> float:
    return float((torch.from_numpy(found).double() - expected).abs().max())


@pytest.mark.parametrize("kind", DRAWN)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 9999), signed=st.booleans())
def test_weights_when_pairs_fit_then_sums_are_exact_in_any_session(kind, seed, signed) -> None:
    model, x, expected = product(kind, seed, fits=True, signed=signed)
    assert write_exactly(model) == 0
    found = opened(model).run(None, {"x": x})[0]
    assert apart(found, expected) <= (kind == "conv")


@pytest.mark.parametrize("kind", DRAWN)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 9999), signed=st.booleans())
def test_weights_when_pairs_do_not_fit_then_written_they_are_exact(kind, seed, signed) -> None:
    model, x, expected = product(kind, seed, fits=False, signed=signed)
    weight = torch.from_numpy(numpy_helper.to_array(model.graph.initializer[-3]).copy())
    over = float(greatest_pairs(weight).max()) > MOST
    assert write_exactly(model) == int(over)
    types = {i.name: i.data_type for i in model.graph.initializer}
    assert types.get("w_uint8") == (TensorProto.UINT8 if over else None)
    assert ("w" in types) is not over
    assert write_exactly(model) == 0
    found = opened(model).run(None, {"x": x})[0]
    assert apart(found, expected) <= (kind == "conv")


@pytest.mark.skipif(sums_are_exact(), reason="ONNX Runtime's sums are exact here anyway")
@pytest.mark.parametrize("kind", DRAWN)
def test_weights_when_as_they_were_then_sums_are_cut_off_here(kind) -> None:
    model, x, expected = product(kind, 3, fits=False)
    found = opened(model).run(None, {"x": x})[0]
    assert apart(found, expected) > 10


def test_depthwise_when_written_then_its_weight_stays_int8() -> None:
    weight = np.full((8, 1, 3, 3), 127, np.int8)
    node = helper.make_node("ConvInteger", ["x", "w"], ["y"], group=8)
    x = helper.make_tensor_value_info("x", TensorProto.UINT8, [1, 8, 9, 9])
    y = helper.make_tensor_value_info("y", TensorProto.INT32, None)
    graph = helper.make_graph([node], "g", [x], [y], [numpy_helper.from_array(weight, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    assert write_exactly(model) == 0


def test_weight_when_another_operator_reads_it_then_it_stays_there() -> None:
    weight = numpy_helper.from_array(np.full((4, 3), 127, np.int8), "w")
    nodes = [
        helper.make_node("Gather", ["w", "i"], ["r"]),
        helper.make_node("MatMulInteger", ["x", "w"], ["y"]),
        helper.make_node("MatMulInteger", ["x", "w"], ["z"]),
    ]
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.UINT8, [2, 4]),
        helper.make_tensor_value_info("i", TensorProto.INT64, [1]),
    ]
    types = {"r": TensorProto.INT8, "y": TensorProto.INT32, "z": TensorProto.INT32}
    outputs = [helper.make_tensor_value_info(n, t, None) for n, t in types.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    assert write_exactly(model) == 1
    assert {i.name for i in model.graph.initializer} == {"w", "w_uint8", "middle_uint8"}
    given = {"x": np.full((2, 4), 255, np.uint8), "i": np.zeros(1, np.int64)}
    r, y, z = opened(model).run(None, given)
    assert r.dtype == np.int8
    assert (y == 255 * 127 * 4).all()
    assert (z == y).all()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.linear = nn.Conv2d(8, 32, 3), nn.Linear(32 * 36, 16)

    def forward(self, x):
        return self.linear(self.conv(x).relu().flatten(1))


def lowered(recipe: str):
    x = torch.randn(4, 8, 8, 8, generator=torch.Generator().manual_seed(1))
    backend = pq.backends.get("onnx").allowing_slower()
    how = {"calibration_data": [(x,)]} if recipe == "int8" else {}
    made = pq.quantize(
        Net().eval(), args=(x,), backend=backend, recipe=recipe, progress=False, **how
    )
    return made, x


def matrices(artifact) -> set[int]:
    """The types of a file's integer constants of more than one axis."""
    held = onnx.load_from_string(artifact.model).graph.initializer
    return {i.data_type for i in held if len(i.dims) > 1 and i.data_type != TensorProto.FLOAT}


@pytest.mark.parametrize("recipe", ["int8", "int8_dynamic", "int8_dynamic_per_tensor"])
def test_file_when_saved_then_its_pairs_fit_and_it_runs_as_the_graph(tmp_path, recipe) -> None:
    artifact, x = lowered(recipe)
    assert write_exactly(onnx.load_from_string(artifact.model)) == 0
    assert TensorProto.UINT8 not in matrices(artifact)
    artifact.save(tmp_path / "net.onnx")
    loaded = pq.backends.get("onnx").load(tmp_path / "net.onnx")
    for at in (x, 5 * x.sign()):  # the ends of the ranges
        expected = artifact.quantized(at)
        for one in (artifact, loaded):
            assert pq.sqnr_db(expected, one.run(at)) > 50


@pytest.mark.parametrize(("cpu", "type_"), [("cpu_avx2", "UINT8"), ("cpu_amx", "INT8")])
def test_file_when_a_weight_does_not_fit_then_uint8_where_there_is_no_vnni(
    monkeypatch, cpu, type_
) -> None:
    monkeypatch.setenv("PT2E_QUANT_MEASURED_CPU", cpu)
    x = torch.randn(4, 8, 8, 8, generator=torch.Generator().manual_seed(1))
    backend = pq.backends.get("onnx").allowing_slower()
    quantizer = backend.quantizer("int8")
    for name in ("pair_scales", "pair_codes"):
        quantizer.remove_algorithm(name)
    prepared = pq.prepare_pt2e(torch.export.export(Net().eval(), (x,)), quantizer)
    artifact = backend.lower(pq.convert_pt2e(pq.calibrate(prepared, [(x,)], progress=False)))
    assert matrices(artifact) == {getattr(TensorProto, type_)}
    for at in (x, 5 * x.sign()):
        assert pq.sqnr_db(artifact.quantized(at), artifact.run(at)) > 50


def test_model_when_sums_are_exact_here_then_it_runs_as_it_is(monkeypatch) -> None:
    monkeypatch.setattr(exact_sums, "sums_are_exact", lambda: True)
    assert runs_exactly(b"anything") == b"anything"
