import pytest
import torch
from torch import nn

pytest.importorskip("executorch", reason="needs the extra xnnpack")
pytest.importorskip("onnxruntime", reason="needs the extra onnx")
pytest.importorskip("torchao", reason="needs torchao")

from benchmarks import peers_low_bit as peers
from benchmarks.measure import sqnr_db
from tests.needs_vnni import NEEDS_VNNI

# two linears of normal weights: the rounding of 8 bits and of 4
LEAST_DB = {8: 30.0, 4: 12.0}
pytestmark = pytest.mark.filterwarnings("ignore")  # the peers' own, which are not ours to fix


@pytest.fixture(scope="module")
def case():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32)).eval()
    inputs = (torch.randn(1, 8, 64),)
    with torch.no_grad():
        reference = model(*inputs)
    return model, inputs, reference


@pytest.fixture(scope="module")
def float_file(case):
    model, inputs, _ = case
    return peers.onnx_float(model, peers.plain_exporter(inputs)).data


@pytest.mark.slow
def test_executorch_peers_when_dynamic_then_near_to_float(case):
    model, inputs, reference = case
    how = peers.plain_exporter(inputs)
    for bits, program in (
        (8, peers.executorch_int8_dynamic(model, how)),
        (8, peers.executorch_quantize(model, how, None, bits=8)),
        (4, peers.executorch_quantize(model, how, 32)),
    ):
        assert sqnr_db([reference], program.run(*inputs)) > LEAST_DB[bits], program.label


@pytest.mark.parametrize("algorithm", peers.ALGORITHMS)
@pytest.mark.parametrize("level", peers.ACCURACY_LEVELS)
def test_matmul_nbits_when_any_algorithm_then_two_of_them_at_that_level(
    case, float_file, algorithm, level
):
    onnx = pytest.importorskip("onnx")
    _, inputs, reference = case
    program = peers.onnx_matmul_nbits(float_file, 32, level, algorithm=algorithm)
    assert sqnr_db([reference], program.run(*inputs)) > LEAST_DB[4]
    nodes = onnx.load_from_string(program.data).graph.node
    found = [node for node in nodes if node.op_type == "MatMulNBits"]
    levels = [a.i for node in found for a in node.attribute if a.name == "accuracy_level"]
    assert levels == [level, level]


@NEEDS_VNNI  # its weights take all of int8, and their products are cut off without
def test_quantize_dynamic_when_run_then_near_to_float(case, float_file):
    _, inputs, reference = case
    program = peers.onnx_dynamic(float_file)
    assert sqnr_db([reference], program.run(*inputs)) > LEAST_DB[8]
    assert program.size_bytes < 0.5 * len(float_file)
