import pytest
import torch
from torch import nn
from torch.export import export

from pt2e_quant.command_line.open_model import backend_of, open_model, open_reference
from pt2e_quant.core.errors import ArtifactError
from pt2e_quant.core.read_capture import rebuild_capture


class Keywords(nn.Module):
    """A call with a keyword, and an argument that is None."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x, mask=None, *, shift):
        return {"y": torch.relu(self.linear(x)) + shift}


@pytest.fixture
def program():
    torch.manual_seed(0)
    args, kwargs = (torch.randn(2, 4), None), {"shift": torch.randn(2, 3)}
    ep = export(Keywords().eval(), args, kwargs)
    leaves = [args[0], None, kwargs["shift"]]
    return ep, rebuild_capture(ep.module()), leaves, ep.module()(*args, **kwargs)["y"]


def test_open_when_a_pt2_program_then_runs_as_exported(program, tmp_path):
    ep, _, leaves, expected = program
    torch.export.save(ep, tmp_path / "float.pt2")
    model = open_model(tmp_path / "float.pt2")
    assert [i.path for i in model.capture.inputs] == ["x", "mask", "shift"]
    assert torch.equal(model.run_leaves(leaves)[0], expected)


def test_open_when_a_float_onnx_of_another_tool_then_a_reference(program, tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    ep, capture, leaves, expected = program
    torch.onnx.export(ep, dynamo=True, verbose=False).save(tmp_path / "float.onnx")
    with pytest.raises(ArtifactError, match=r"float\.onnx was not written by this package"):
        open_model(tmp_path / "float.onnx")
    run = open_reference(tmp_path / "float.onnx", capture, threads=1)
    torch.testing.assert_close(run(leaves)[0], expected)


def test_open_when_a_float_pte_of_another_tool_then_a_reference(program, tmp_path):
    exir = pytest.importorskip("executorch.exir")
    partitioners = pytest.importorskip("executorch.backends.xnnpack.partition.xnnpack_partitioner")
    ep, capture, leaves, expected = program
    edge = exir.to_edge_transform_and_lower(ep, partitioner=[partitioners.XnnpackPartitioner()])
    (tmp_path / "float.pte").write_bytes(edge.to_executorch().buffer)
    with pytest.raises(ArtifactError, match="not written by this package"):
        open_model(tmp_path / "float.pte")
    run = open_reference(tmp_path / "float.pte", capture, threads=1)
    for _ in range(3):
        torch.testing.assert_close(run(leaves)[0], expected)


@pytest.mark.parametrize("suffix", [".onnx", ".pte", ".pt2"])
def test_open_when_a_reference_is_damaged_or_missing_then_refused(program, tmp_path, suffix):
    package = {".onnx": "onnxruntime", ".pte": "executorch", ".pt2": "torch"}[suffix]
    pytest.importorskip(package)
    path = tmp_path / f"float{suffix}"
    with pytest.raises(ArtifactError, match="there is no file"):
        open_reference(path, program[1], threads=1)
    path.write_bytes(b"hello" * 50)
    with pytest.raises(ArtifactError):
        open_reference(path, program[1], threads=1)


def test_backend_of_when_given_a_file_then_found_by_its_suffix(tmp_path, plain_backend):
    assert backend_of(tmp_path / "a.plain") is plain_backend
    assert backend_of(tmp_path / "a.onnx").name == "onnx"
    with pytest.raises(ArtifactError, match=r'no backend writes files that end in "\.bin"'):
        backend_of(tmp_path / "a.bin")
