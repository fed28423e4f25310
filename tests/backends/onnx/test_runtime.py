"""What ONNX Runtime runs, classified by the numbers it computes with."""

import pytest
import torch

pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

import onnx.parser

from pt2e_quant.backends.onnx.runtime import (
    OperatorKind,
    OptimizedModel,
    SessionCall,
    open_session,
    optimize,
    read_operators,
)
from pt2e_quant.core.errors import ArtifactError

MODEL = """
<ir_version: 10, opset_import: ["" : 21]>
g (float[N,2,4,4] x) => (float[N,2,4,4] y, int64[4] shape)
<float s = {0.05}, uint8 z = {100}, int8[2,2,1,1] w = {1,-2,3,-4}, float[2] ws = {0.1,0.2}> {
  q = QuantizeLinear(x, s, z)
  d = DequantizeLinear(q, s, z)
  wd = DequantizeLinear<axis=0>(w, ws)
  c = Conv(d, wd)
  %s
  shape = Shape(x)
}
"""


def text(tail: str) -> bytes:
    model = onnx.parser.parse_model(MODEL % tail)
    data: bytes = model.SerializeToString()
    return data


FUSED = "q2 = QuantizeLinear(c, s, z)\n y = DequantizeLinear(q2, s, z)"


def test_optimize_when_everything_fuses_then_only_the_border_converts() -> None:
    optimized, _ = optimize(text(FUSED))
    assert optimized.count(OperatorKind.INTEGER)["QLinearConv"] == 1
    assert optimized.count(OperatorKind.CONVERT) == {"QuantizeLinear": 1, "DequantizeLinear": 1}
    assert optimized.count(OperatorKind.INDEX) == {"Shape": 1}
    assert optimized.count(OperatorKind.FLOAT) == {}
    assert optimized.unfused() == []


def test_optimize_when_output_is_float_then_the_weight_is_named_as_left() -> None:
    optimized, _ = optimize(text("y = Gelu(c)"))
    assert optimized.count(OperatorKind.FLOAT) == {"Conv": 1, "Gelu": 1}
    left = {o.output: o for o in optimized.unfused()}
    assert any(o.is_constant and o.readers == ("Conv",) for o in left.values())


def test_read_operators_when_gemm_gives_float_then_its_reader_is_float() -> None:
    graph = onnx.helper.make_graph(
        [
            onnx.helper.make_node(
                "QGemm", ["a", "s", "z", "b", "s", "z"], ["c"], domain="com.microsoft"
            ),
            onnx.helper.make_node("Relu", ["c"], ["y"]),
        ],
        "g",
        [],
        [],
        [onnx.helper.make_tensor("z", onnx.TensorProto.UINT8, [], [0])],
    )
    operators = read_operators(graph)
    assert [o.kind for o in operators] == [OperatorKind.INTEGER, OperatorKind.FLOAT]
    assert OptimizedModel(tuple(operators)).count() == {"QGemm": 1, "Relu": 1}


def test_open_session_when_bytes_are_no_model_then_error_says_so() -> None:
    with pytest.raises(ArtifactError, match="does not load"):
        open_session(b"nothing")


def test_session_call_when_tensor_is_a_view_then_it_is_copied() -> None:
    call = SessionCall(open_session(text(FUSED), threads=1))
    x = torch.randn(4, 4, 2, 1).permute(3, 2, 0, 1)
    expected = call.run([x.contiguous()])
    torch.testing.assert_close(call.run([x])[0], expected[0], rtol=0, atol=0)
