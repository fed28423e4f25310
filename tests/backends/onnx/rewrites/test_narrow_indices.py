"""Large int64 tables take as few bytes as they need, and give the same places."""

import numpy as np
import pytest

pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

import onnx_ir as ir
import onnxruntime
from hypothesis import given
from hypothesis import strategies as st

from pt2e_quant.backends.onnx.rewrites.narrow_indices import WORTHWHILE, narrow_indices

HEADER = '<ir_version: 10, opset_import: ["" : 21]>'


def adding(table: np.ndarray, readers: str = "y = Add(x, t)") -> ir.Model:
    model = ir.from_onnx_text(f"{HEADER} g (int64[1] x) => (int64[A] y) {{ {readers} }}")
    value = next(node for node in model.graph).inputs[1]
    assert value is not None
    value.name, value.dtype, value.shape = "t", ir.DataType.INT64, ir.Shape(table.shape)
    value.const_value = ir.tensor(table, name="t")
    model.graph.register_initializer(value)
    return model


def stored_bytes(model: ir.Model) -> int:
    held = [value.const_value for value in model.graph.initializers.values()]
    return sum(tensor.nbytes for tensor in held if tensor is not None)


def result(model: ir.Model) -> np.ndarray:
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    return session.run(None, {"x": np.array([1], np.int64)})[0]


@given(low=st.integers(-(2**40), 2**40), span=st.integers(0, 2**40), count=st.integers(1, 2000))
def test_narrow_indices_when_values_have_any_range_then_results_stay(low, span, count):
    table = np.linspace(low, low + span, count).astype(np.int64)
    model = adding(table)
    before, size = result(model), stored_bytes(model)
    fired = narrow_indices(model.graph)
    np.testing.assert_array_equal(before, result(model))
    assert stored_bytes(model) <= size - fired * WORTHWHILE
    assert narrow_indices(model.graph) == 0


@pytest.mark.parametrize(
    ("low", "high", "width"),
    [(0, 255, 1), (-128, 127, 1), (0, 65535, 2), (-1, 255, 2), (-1, 65535, 4), (0, 2**31 - 1, 4)],
)
def test_narrow_indices_when_a_type_just_holds_them_then_it_is_taken(low, high, width):
    table = np.array([low, high] * 500, np.int64)
    model = adding(table)
    assert narrow_indices(model.graph) == 1
    assert stored_bytes(model) == width * table.size


def test_narrow_indices_when_all_values_are_one_then_it_is_stored_once():
    model = adding(np.full((4, 500), 7, np.int64))
    assert narrow_indices(model.graph) == 1
    assert stored_bytes(model) == 8 + 2 * 8
    np.testing.assert_array_equal(result(model), np.full((4, 500), 8))


def test_narrow_indices_when_two_read_it_then_the_cast_stands_before_both():
    model = adding(np.arange(1000), "z = Add(x, t)\n y = Add(z, t)")
    model.graph[1].replace_input_with(1, model.graph[0].inputs[1])
    assert narrow_indices(model.graph) == 1
    assert [node.op_type for node in model.graph] == ["Cast", "Add", "Add"]
    np.testing.assert_array_equal(result(model), 2 * np.arange(1000) + 1)


@pytest.mark.parametrize("table", [np.arange(100), np.arange(1000) * 2**40])
def test_narrow_indices_when_little_is_won_then_the_table_stays(table):
    assert narrow_indices(adding(table).graph) == 0
