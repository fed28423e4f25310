"""A Llama whose KV cache is kept in 8 or 4 bits, token by token on both runtimes."""

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

import pt2e_quant as pq
from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.graph.alias import mutated_buffers

pytest.importorskip("transformers")

from benchmarks.llama_model import LlamaShape, random_llama
from benchmarks.llm_quality import predict
from pt2e_quant.flow.causal_lm import export_causal_lm

SHAPE = LlamaShape(
    layers=1, width=128, heads=4, kv_heads=2, intermediate=256, vocabulary=256, context=48
)
LONGEST = 12
RECIPES = {"onnx": "w4_g32", "xnnpack": "a8w4_g32"}
EXTRAS = {"xnnpack": "executorch", "onnx": "onnxruntime"}
CASES = [
    pytest.param("onnx", 8, marks=pytest.mark.slow),
    ("onnx", 4),
    pytest.param("xnnpack", 8, marks=pytest.mark.slow),
    pytest.param("xnnpack", 4, marks=pytest.mark.slow),
]
FLOAT_SUMS_DB, INT8_ROWS_DB = 90.0, 20.0
"""From the graph: XNNPACK's linears round rows to int8, so float sums in another order move some
to the next integer, and codes of a cache with them."""


def tokens(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(SHAPE.vocabulary, (count,), generator=generator)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("name", "bits"), CASES)
def test_llama_when_its_cache_is_quantized_then_as_its_graph_for_any_prompt(name, bits, tmp_path):
    if find_spec(EXTRAS[name]) is None:
        pytest.skip(f"needs {EXTRAS[name]}")
    backend = pq.backends.get(name)
    quantizer = backend.quantizer(RECIPES[name])
    quantizer.quantize_caches(bits)
    with torch.no_grad():
        ep = export_causal_lm(
            random_llama(SHAPE), max_length=SHAPE.context, with_state=True, max_prompt=LONGEST
        )
        gm = pq.convert_pt2e(pq.prepare_pt2e(ep, quantizer))
        sample = tokens(LONGEST, seed=1)[None], torch.arange(LONGEST)
        artifact = backend.lower(gm, sample)
        artifact.save(tmp_path / f"llama{backend.suffix}")
        loaded = backend.load(tmp_path / f"llama{backend.suffix}")
        names = {f"cache_{index}_{part}" for index in range(2) for part in ("q", "scale")}
        assert {*mutated_buffers(gm)} == {*capture_of(gm).mutated_buffers} == names
        window = tokens(20, seed=2)
        for prompt in (1, 7):
            expected = predict(gm, window, prompt)
            for program in (artifact, loaded):
                found = predict(program.run, window, prompt)
                least = FLOAT_SUMS_DB if name == "onnx" else INT8_ROWS_DB
                assert pq.sqnr_db(expected, found) > least
