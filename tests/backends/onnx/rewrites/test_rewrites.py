"""Each rewrite: it fires, it declines, numbers hold, a second run changes nothing."""

from collections.abc import Callable

import numpy as np
import pytest

ir = pytest.importorskip("onnx_ir", reason="the extra onnx is not installed")
pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

from pt2e_quant.backends.onnx.rewrites.dequantize_once import gather_integers  # noqa: E402
from pt2e_quant.backends.onnx.rewrites.guide_fusions import (  # noqa: E402
    integer_bias,
    widen_bias,
)
from pt2e_quant.backends.onnx.rewrites.pipeline import (  # noqa: E402
    keep_layer_norm,
    relu_as_max,
)
from pt2e_quant.backends.onnx.rewrites.run_on_integers import (  # noqa: E402
    absorb_clips,
    cancel_requantize,
    fold_casts,
    run_on_integers,
    subtract_by_add,
    unsigned_activations,
)

HEADER = '<ir_version: 10, opset_import: ["" : 21]>\n'
QPARAMS = "float s = {0.05}, uint8 z = {100}, float s2 = {0.03}, uint8 z2 = {7}, uint8 zero = {0}"


def model_of(signature: str, constants: str, body: str) -> ir.Model:
    """A model from ONNX text, constants being further initializers."""
    extra = f", {constants}" if constants else ""
    return ir.from_onnx_text(f"{HEADER}g {signature} <{QPARAMS}{extra}> {{\n{body}\n}}")


def op_types(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def run(model: ir.Model, **feeds: np.ndarray) -> list[np.ndarray]:
    """Outputs with ONNX Runtime's own optimisation off."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    found: list[np.ndarray] = session.run(None, feeds)
    return found


def check(
    rewrite: Callable[[ir.Graph], int],
    model: ir.Model,
    expected: list[str],
    *,
    fired: int = 1,
    **feeds: np.ndarray,
) -> None:
    """The rewrite fires so often, leaves these operators, and changes no output."""
    before = run(model, **feeds)
    assert rewrite(model.graph) == fired
    assert op_types(model) == expected
    for left, right in zip(before, run(model, **feeds), strict=True):
        np.testing.assert_array_equal(left, right)
    assert rewrite(model.graph) == 0
    assert op_types(model) == expected


@pytest.fixture
def x() -> np.ndarray:
    return np.random.default_rng(0).normal(0, 4, (2, 3, 4, 4)).astype(np.float32)


SIGNATURE = "(float[N,3,4,4] x) => (float[N,3,4,4] y)"


def test_absorb_clips_when_range_starts_at_zero_then_relu_goes(x: np.ndarray) -> None:
    model = model_of(
        SIGNATURE,
        "",
        "r = Relu(x)\n q = QuantizeLinear(r, s, zero)\ny = DequantizeLinear(q, s, zero)",
    )
    check(absorb_clips, model, ["QuantizeLinear", "DequantizeLinear"], x=x)


def test_absorb_clips_when_range_reaches_further_then_integers_are_clipped(x: np.ndarray) -> None:
    model = model_of(
        SIGNATURE,
        "float low = {0}, float high = {6}",
        "r = Clip(x, low, high)\n q = QuantizeLinear(r, s, z)\n y = DequantizeLinear(q, s, z)",
    )
    check(absorb_clips, model, ["QuantizeLinear", "Clip", "DequantizeLinear"], x=x)


def test_absorb_clips_when_several_quantizes_read_then_each_gets_its_limits(x: np.ndarray) -> None:
    model = model_of(
        "(float[N,3,4,4] x) => (float[N,3,4,4] y, float[N,3,4,4] y2)",
        "",
        "r = Relu(x)\n q = QuantizeLinear(r, s, z)\n q2 = QuantizeLinear(r, s2, zero)\n"
        "y = DequantizeLinear(q, s, z)\n y2 = DequantizeLinear(q2, s2, zero)",
    )
    expected = ["QuantizeLinear", "Clip", "QuantizeLinear", "DequantizeLinear", "DequantizeLinear"]
    check(absorb_clips, model, expected, x=x)


def test_absorb_clips_when_float_reads_the_relu_then_it_declines(x: np.ndarray) -> None:
    model = model_of(
        SIGNATURE,
        "",
        "r = Relu(x)\n q = QuantizeLinear(r, s, zero)\n"
        "d = DequantizeLinear(q, s, zero)\n y = Add(d, r)",
    )
    before = op_types(model)
    check(absorb_clips, model, before, fired=0, x=x)


@pytest.mark.parametrize("mode", ["constant", "reflect", "edge"])
def test_run_on_integers_when_pad_keeps_qparams_then_it_pads_integers(
    x: np.ndarray, mode: str
) -> None:
    model = model_of(
        "(float[N,3,4,4] x) => (float[N,3,6,6] y)",
        "int64[8] pads = {0,0,1,1,0,0,1,1}, float value = {1.5}",
        "q = QuantizeLinear(x, s, z)\n d = DequantizeLinear(q, s, z)\n"
        f'p = Pad<mode="{mode}">(d, pads, value)\n'
        "q2 = QuantizeLinear(p, s, z)\n y = DequantizeLinear(q2, s, z)",
    )
    check(
        run_on_integers,
        model,
        ["QuantizeLinear", "DequantizeLinear", "Pad", "DequantizeLinear"],
        x=x,
    )


def test_run_on_integers_when_qparams_differ_then_it_declines(x: np.ndarray) -> None:
    model = model_of(
        SIGNATURE,
        "",
        "q = QuantizeLinear(x, s, z)\n d = DequantizeLinear(q, s, z)\n m = Max(d, d)\n"
        "q2 = QuantizeLinear(m, s2, z)\n y = DequantizeLinear(q2, s2, z)",
    )
    check(run_on_integers, model, op_types(model), fired=0, x=x)


def test_cancel_requantize_when_qparams_are_equal_then_both_go(x: np.ndarray) -> None:
    model = model_of(
        SIGNATURE,
        "",
        "q = QuantizeLinear(x, s, z)\n d = DequantizeLinear(q, s, z)\n"
        "q2 = QuantizeLinear(d, s, z)\n y = DequantizeLinear(q2, s, z)",
    )
    check(cancel_requantize, model, ["QuantizeLinear", "DequantizeLinear", "DequantizeLinear"], x=x)


def test_cancel_requantize_when_zero_points_differ_then_it_declines(x: np.ndarray) -> None:
    model = model_of(
        SIGNATURE,
        "",
        "q = QuantizeLinear(x, s, z)\n d = DequantizeLinear(q, s, z)\n"
        "q2 = QuantizeLinear(d, s, z2)\n y = DequantizeLinear(q2, s, z2)",
    )
    check(cancel_requantize, model, op_types(model), fired=0, x=x)


def test_subtract_by_add_when_output_is_quantized_then_the_complement_is_added(
    x: np.ndarray,
) -> None:
    model = model_of(
        SIGNATURE,
        "",
        "q = QuantizeLinear(x, s, z)\n d = DequantizeLinear(q, s, z)\n"
        "e = QuantizeLinear(x, s2, z2)\n f = DequantizeLinear(e, s2, z2)\n"
        "m = Sub(d, f)\n q2 = QuantizeLinear(m, s, z)\n y = DequantizeLinear(q2, s, z)",
    )
    before = run(model, x=x)
    assert subtract_by_add(model.graph) == 1
    assert "Sub" not in op_types(model)
    assert "BitwiseNot" in op_types(model)
    np.testing.assert_array_equal(before[0], run(model, x=x)[0])
    assert subtract_by_add(model.graph) == 0


def test_subtract_by_add_when_output_is_float_then_it_declines(x: np.ndarray) -> None:
    model = model_of(
        SIGNATURE,
        "",
        "q = QuantizeLinear(x, s, z)\n d = DequantizeLinear(q, s, z)\n y = Sub(d, d)",
    )
    check(subtract_by_add, model, op_types(model), fired=0, x=x)


TABLE = "int8[4,2] table = {1,-2,3,-4,5,-6,127,-127}, float[4] scales = {0.1,0.2,0.3,0.4}"


def test_gather_integers_when_rows_are_symmetric_then_found_rows_are_scaled() -> None:
    model = model_of(
        "(int64[N,3] ids) => (float[N,3,2] y)",
        TABLE,
        "t = DequantizeLinear<axis=0>(table, scales)\n y = Gather(t, ids)",
    )
    expected = ["DequantizeLinear", "Gather", "Cast", "Gather", "Mul"]
    check(gather_integers, model, expected, ids=np.array([[0, 3, 1]]))


def test_gather_integers_when_rows_are_affine_then_zero_points_are_gathered_too() -> None:
    model = model_of(
        "(int64[N,3] ids) => (float[N,3,2] y)",
        TABLE + ", int8[4] zeros = {1,-2,3,0}",
        "t = DequantizeLinear<axis=0>(table, scales, zeros)\n y = Gather(t, ids)",
    )
    expected = ["DequantizeLinear", "Gather", "Cast", "Gather", "Sub", "Gather", "Mul"]
    check(gather_integers, model, expected, ids=np.array([[0, 3, 1], [2, 2, 2]]))


def test_gather_integers_when_one_scale_then_found_rows_are_dequantized() -> None:
    model = model_of(
        "(int64[N,3] ids) => (float[N,3,2] y)",
        TABLE,
        "t = DequantizeLinear(table, s)\n y = Gather(t, ids)",
    )
    expected = ["DequantizeLinear", "Gather", "DequantizeLinear"]
    check(gather_integers, model, expected, ids=np.array([[0, 3, 1]]))


def test_gather_integers_when_table_is_activation_then_it_declines(x: np.ndarray) -> None:
    model = model_of(
        "(float[N,3,4,4] x) => (float[M,3,4,4] y)",
        "int64[1] ids = {0}",
        "q = QuantizeLinear(x, s, z)\n d = DequantizeLinear(q, s, z)\n y = Gather(d, ids)",
    )
    check(gather_integers, model, op_types(model), fired=0, x=x)


WEIGHT = "int8[4,2] w = {1,-2,3,-4,5,-6,127,-127}, float[2] ws = {0.1,0.2}, float[2] bias = {1,-2}"
LINEAR = (
    "q = QuantizeLinear(x, s, z)\n d = DequantizeLinear(q, s, z)\n"
    "wd = DequantizeLinear<axis=1>(w, ws)\n m = MatMul(d, wd)\n y = Add(m, bias)"
)


def test_widen_bias_when_matmul_is_quantized_then_bias_gets_leading_ones(x: np.ndarray) -> None:
    model = model_of("(float[N,3,4,4] x) => (float[N,3,4,2] y)", WEIGHT, LINEAR)
    for node in model.graph:  # shapes are not inferred in text
        if node.op_type == "MatMul":
            node.outputs[0].shape = ir.Shape(["N", 3, 4, 2])
    check(widen_bias, model, op_types(model), x=x)
    add = next(n for n in model.graph if n.op_type == "Add")
    assert add.inputs[1].const_value.shape == (1, 1, 2)


def test_widen_bias_when_matmul_is_float_then_it_declines(x: np.ndarray) -> None:
    model = model_of(
        "(float[N,3,4,4] x) => (float[N,3,4,2] y)",
        "float[4,2] w = {1,2,3,4,5,6,7,8}, float[2] bias = {1,-2}",
        "m = MatMul(x, w)\n y = Add(m, bias)",
    )
    check(widen_bias, model, op_types(model), fired=0, x=x)


CONV_WEIGHT = (
    "int8[2,3,1,1] w = {1,-2,3,-4,5,-6}, float[2] ws = {0.1,0.2}, float[2] bias = {1.003,-2}"
)


def test_integer_bias_when_conv_is_quantized_then_bias_is_on_the_accumulator_scale(
    x: np.ndarray,
) -> None:
    model = model_of(
        "(float[N,3,4,4] x) => (float[N,2,4,4] y)",
        CONV_WEIGHT,
        "q = QuantizeLinear(x, s, z)\n d = DequantizeLinear(q, s, z)\n"
        "wd = DequantizeLinear<axis=0>(w, ws)\n c = Conv(d, wd, bias)\n"
        "q2 = QuantizeLinear(c, s2, z2)\n y = DequantizeLinear(q2, s2, z2)",
    )
    assert integer_bias(model.graph) == 1
    conv = next(n for n in model.graph if n.op_type == "Conv")
    made = conv.inputs[2].producer()
    assert made.op_type == "DequantizeLinear"
    steps, scale = (v.const_value.numpy() for v in made.inputs[:2])
    assert steps.dtype == np.int32
    np.testing.assert_array_equal(scale, np.float32(0.05) * np.array([0.1, 0.2], np.float32))
    np.testing.assert_allclose(steps * scale, [1.003, -2], atol=scale.max() / 2)
    assert integer_bias(model.graph) == 0


def test_integer_bias_when_it_would_overflow_then_it_declines(x: np.ndarray) -> None:
    tiny = CONV_WEIGHT.replace("{0.1,0.2}", "{1e-12,0.2}")
    model = model_of(
        "(float[N,3,4,4] x) => (float[N,2,4,4] y)",
        tiny,
        "q = QuantizeLinear(x, s, z)\n d = DequantizeLinear(q, s, z)\n"
        "wd = DequantizeLinear<axis=0>(w, ws)\n c = Conv(d, wd, bias)\n"
        "q2 = QuantizeLinear(c, s2, z2)\n y = DequantizeLinear(q2, s2, z2)",
    )
    check(integer_bias, model, op_types(model), fired=0, x=x)


NORM = "float[4] g = {1,2,3,4}"


def test_keep_layer_norm_when_a_sum_is_normalized_then_add_becomes_sum(x: np.ndarray) -> None:
    model = model_of(
        SIGNATURE, NORM, "a = Add(x, x)\n n = LayerNormalization(a, g)\n y = Add(n, a)"
    )
    check(keep_layer_norm, model, ["Sum", "LayerNormalization", "Add"], x=x)


def test_keep_layer_norm_when_no_norm_reads_then_it_declines(x: np.ndarray) -> None:
    model = model_of(SIGNATURE, NORM, "y = Add(x, x)")
    check(keep_layer_norm, model, ["Add"], fired=0, x=x)


def test_fold_casts_when_constant_is_cast_then_it_is_stored_in_the_new_type() -> None:
    model = model_of(
        "(float[N,4] x) => (float[N,4] y)",
        "int32[4] k = {1,2,3,4}",
        "c = Cast<to=1>(k)\n y = Mul(x, c)",
    )
    check(fold_casts, model, ["Mul"], x=np.ones((2, 4), np.float32))


def test_fold_casts_when_value_is_computed_then_it_declines() -> None:
    model = model_of("(int64[N] x) => (float[N] y)", "", "y = Cast<to=1>(x)")
    check(fold_casts, model, ["Cast"], fired=0, x=np.arange(3))


GEMM = "int8[4,4] w = {1,-2,3,-4,5,-6,7,-8,1,-2,3,-4,5,-6,7,-8}, float[4] ws = {0.1,0.2,0.3,0.4}"
GEMM_RELU = (
    "q = QuantizeLinear(x, s, z)\n d = DequantizeLinear(q, s, z)\n"
    "wd = DequantizeLinear<axis=0>(w, ws)\n g = Gemm<transB=1>(d, wd)\n y = Relu(g)"
)


def test_relu_as_max_when_gemm_is_quantized_then_relu_is_written_as_max() -> None:
    model = model_of("(float[N,4] x) => (float[N,4] y)", GEMM, GEMM_RELU)
    expected = [*op_types(model)[:-1], "Max"]
    check(relu_as_max, model, expected, x=np.random.default_rng(1).normal(size=(3, 4)).astype("f4"))


def test_relu_as_max_when_gemm_is_float_then_it_declines() -> None:
    model = model_of("(float[N,4] x) => (float[N,4] y)", GEMM, "g = Gemm(x, x)\n y = Relu(g)")
    check(relu_as_max, model, ["Gemm", "Relu"], fired=0, x=np.eye(4, dtype=np.float32))


SIGNED = "int8 n = {-20}, int8 low = {-100}, int8 high = {90}"


def test_unsigned_activations_when_int8_is_dequantized_then_it_moves_to_uint8(
    x: np.ndarray,
) -> None:
    model = model_of(
        "(float[N,3,4,4] x) => (float[N,3,4,4] y, float[N,3,4,4] y2)",
        SIGNED,
        "q = QuantizeLinear(x, s, n)\n c = Clip(q, low, high)\n"
        "y = DequantizeLinear(c, s, n)\n y2 = DequantizeLinear(c, s, n)",
    )
    check(unsigned_activations, model, op_types(model), x=x)
    stored = [node.inputs[-1].const_value.numpy() for node in model.graph]
    assert [(a.dtype, int(a)) for a in stored] == [
        (np.uint8, 108),
        (np.uint8, 218),
        (np.uint8, 108),
        (np.uint8, 108),
    ]


def test_unsigned_activations_when_integers_are_returned_then_it_declines(x: np.ndarray) -> None:
    model = model_of(
        "(float[N,3,4,4] x) => (int8[N,3,4,4] q)", SIGNED, "q = QuantizeLinear(x, s, n)"
    )
    check(unsigned_activations, model, op_types(model), fired=0, x=x)


def test_unsigned_activations_when_they_are_uint8_then_it_declines(x: np.ndarray) -> None:
    model = model_of(SIGNATURE, "", "q = QuantizeLinear(x, s, z)\n y = DequantizeLinear(q, s, z)")
    check(unsigned_activations, model, op_types(model), fired=0, x=x)
