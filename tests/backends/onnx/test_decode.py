"""Language models with a KV cache: what ONNX Runtime runs for a token, and what comes out."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
pytest.importorskip("transformers")

import onnx

import pt2e_quant as pq
from benchmarks.llama_model import LlamaShape, random_llama
from pt2e_quant.backends.onnx.runtime import open_session
from pt2e_quant.flow.causal_lm import carry_cache, empty_cache, export_causal_lm

BACKEND = pq.backends.get("onnx")
LAYERS, LONGEST = 2, 8
SHAPE = LlamaShape(
    layers=LAYERS, width=64, heads=4, kv_heads=2, intermediate=128, vocabulary=64, context=16
)


def optimized(artifact: Any, folder: Any) -> list[onnx.NodeProto]:
    artifact.save(folder / "model.onnx")
    open_session(folder / "model.onnx", optimized_path=folder / "optimized.onnx")
    return list(onnx.load(folder / "optimized.onnx").graph.node)


@pytest.fixture(scope="module")
def llama() -> Any:
    torch.manual_seed(0)
    model = random_llama(SHAPE)
    with torch.no_grad():
        ep = export_causal_lm(model, max_length=SHAPE.context, with_state=False, max_prompt=LONGEST)
    return model, pq.convert_pt2e(pq.prepare_pt2e(ep, BACKEND.quantizer("w8")))


@pytest.mark.parametrize("portable", [False, True])
def test_llama_when_lowered_then_the_cache_is_copied_once(llama, portable, tmp_path):
    model, quantized = llama
    cache = empty_cache(model, SHAPE.context)
    ids = torch.randint(SHAPE.vocabulary, (1, 12), generator=torch.Generator().manual_seed(1))
    artifact = BACKEND.lower(
        quantized, (ids[:, :LONGEST], torch.arange(LONGEST), cache), portable=portable
    )
    steps = [carry_cache(run, cache) for run in (quantized, artifact.run)]
    for start, end in ((0, 8), (8, 9), (9, 12)):
        expected, found = (step(ids[:, start:end], torch.arange(start, end)) for step in steps)
        assert pq.sqnr_db(expected, found) > 100
    ops = Counter(node.op_type for node in optimized(artifact, tmp_path))
    assert ops["ScatterND"] == 2 * LAYERS
    assert ops["SimplifiedLayerNormalization"] == 2 * LAYERS + 1
    assert ops["FusedMatMul"] == LAYERS
    assert ops["Transpose"] == 4 * LAYERS  # of queries, new keys, new values, and results
    assert ops["RotaryEmbedding"] == (0 if portable else 2 * LAYERS)
    assert not {"Expand", "Reciprocal", "Sqrt", "Pow"} & set(ops)
    domains = {node.domain for node in onnx.load(tmp_path / "model.onnx").graph.node}
    assert domains == {""} if portable else {"", "com.microsoft"}


class Grouped(nn.Module):
    """Two query heads for each key head, and a mask of booleans."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(32, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        q = self.query(x).unflatten(-1, (4, 8)).transpose(1, 2)
        k = self.key(x).unflatten(-1, (2, 8)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(q, k, k, seen, enable_gqa=True)


@pytest.mark.parametrize("portable", [False, True])
def test_attention_when_rows_see_nothing_then_they_are_zero(portable, tmp_path):
    torch.manual_seed(0)
    batch, rows = (torch.export.Dim(name, min=1, max=8) for name in ("batch", "rows"))
    seen = torch.rand(2, 1, 5, 5) > 0.4
    seen[1, 0, 3] = False
    args = torch.randn(2, 5, 32), seen
    shapes = ({0: batch, 1: rows}, {0: batch, 2: rows, 3: rows})
    ep = torch.export.export(Grouped().eval(), args, dynamic_shapes=shapes)
    quantized = pq.convert_pt2e(pq.prepare_pt2e(ep, BACKEND.quantizer("w8")))
    artifact = BACKEND.lower(quantized, args, portable=portable)
    for x, mask in (args, (args[0][:1, :1], args[1][:1, :, :1, :1]), (args[0][1:], args[1][1:])):
        found = artifact.run(x, mask)
        torch.testing.assert_close(found, quantized(x, mask), rtol=0, atol=1e-5)
        hidden = ~mask.any(-1)[:, 0]
        assert not found.transpose(1, 2)[hidden].any()
    ops = Counter(node.op_type for node in optimized(artifact, tmp_path))
    assert "Expand" not in ops
    assert ops["Where"] == 1
