"""Results of complex numbers: given by every runtime, and judged by both of their parts."""

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import pt2e_quant as pq

EXTRAS = {"xnnpack": "executorch", "onnx": "onnxruntime", "cpu": "torch"}
SUFFIX = {"xnnpack": ".pte", "onnx": ".onnx", "cpu": ".qpt2"}


class Spectrum(nn.Module):
    """A spectrum beside the real values it is of."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        rows = self.project(x)
        return {"spectrum": torch.fft.rfft(rows), "rows": rows}


@pytest.mark.parametrize("name", EXTRAS)
def test_artifact_when_a_result_is_complex_then_as_the_graph_after_saving_too(name, tmp_path):
    pytest.importorskip(EXTRAS[name])
    torch.manual_seed(0)
    model = Spectrum().eval()
    calls = [torch.randn(rows, 16) for rows in (3, 1, 4)]
    backend = pq.backends.get(name)
    backend = backend.allowing_slower() if name == "cpu" else backend
    artifact = pq.quantize(
        model,
        (calls[0],),
        dynamic_shapes=({0: Dim("batch", min=1, max=4)},),
        calibration_data=[(x,) for x in calls],
        backend=backend,
        progress=False,
    )
    assert artifact.report.integer_ops
    artifact.save(tmp_path / f"model{SUFFIX[name]}")
    loaded = backend.load(tmp_path / f"model{SUFFIX[name]}")
    for x in (*calls, calls[0]):
        expected = model(x)["spectrum"]
        for found in (artifact.run(x)["spectrum"], loaded.run(x)["spectrum"]):
            assert found.dtype == torch.complex64
            assert pq.sqnr_db(expected.real, found.real) > 30
            assert pq.sqnr_db(expected.imag, found.imag) > 30
