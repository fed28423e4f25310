"""A program that went through a file lowers to the same artifact, with the same report."""

import pytest
import torch
from torch import Tensor, nn

import pt2e_quant as pq


class Counting(nn.Module):
    """A convolution, a tied pair of linears; XNNPACK's variant writes a buffer."""

    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.b.weight = self.a.weight
        self.register_buffer("calls", torch.zeros(1))
        self.writes = writes

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if self.writes:
            self.calls.add_(1)
        y = torch.relu(self.conv(x)).mean((2, 3))
        return {"y": self.b(torch.relu(self.a(y))) + self.calls, "x": x}


@pytest.mark.parametrize(("name", "package"), [("xnnpack", "executorch"), ("onnx", "onnxruntime")])
def test_lower_when_loaded_then_the_same_artifact(name, package, tmp_path):
    pytest.importorskip(package)
    backend = pq.backends.get(name)
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    dims = {"x": {0: torch.export.Dim("n", min=1, max=16)}}
    model = Counting(writes=name == "xnnpack").eval()
    program = torch.export.export(model, (x,), dynamic_shapes=dims)
    prepared = pq.prepare_pt2e(program, backend.quantizer("int8"))
    pq.save(prepared, tmp_path / "prepared.ptq")
    quantized = pq.convert_pt2e(pq.calibrate(prepared, [x], progress=False))
    pq.save(quantized, tmp_path / "converted.ptq", shard_bytes=1000)
    resumed = pq.load(tmp_path / "prepared.ptq")
    programs = {
        "loaded": pq.load(tmp_path / "converted.ptq"),
        "mapped": pq.load(tmp_path / "converted.ptq", mmap=True),
        "resumed": pq.convert_pt2e(pq.calibrate(resumed, [x], progress=False)),
    }
    expected = backend.lower(quantized)
    outputs = [expected.run(x[:n])["y"] for n in (3, 1)]
    for label, loaded in programs.items():
        artifact = backend.lower(loaded)
        assert artifact.report.to_json() == expected.report.to_json(), label
        for n, output in zip((3, 1), outputs, strict=True):
            assert torch.equal(artifact.run(x[:n])["y"], output), label
        if name == "xnnpack":
            assert loaded.calls.item() == quantized.calls.item() == 0
