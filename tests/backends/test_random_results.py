"""Models that draw random numbers: each call draws its own, and as torch does."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pt2e_quant as pq
from pt2e_quant.core.errors import ArtifactError

BACKENDS = ["cpu", "onnx", "xnnpack"]
SHARE = 0.3


class Drawing(nn.Module):
    """Results that are drawn, two of each kind from the same input, and one that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.layer(x)
        size = h.abs() + 1
        return {
            "computed": h,
            "dropout": F.dropout(size, SHARE, training=True) / size,
            "dropout again": F.dropout(size, SHARE, training=True) / size,
            "coin": torch.bernoulli(torch.sigmoid(h * 0)),
            "coin again": torch.bernoulli(torch.sigmoid(h * 0)),
            "normal": torch.randn_like(h),
            "normal again": torch.randn_like(h),
            "uniform": torch.rand_like(h),
            "uniform again": torch.rand_like(h),
        }


MOMENTS = {
    "dropout": (1.0, (SHARE / (1 - SHARE)) ** 0.5),
    "coin": (0.5, 0.5),
    "normal": (0.0, 1.0),
    "uniform": (0.5, 12**-0.5),
}
"""The mean and the standard deviation of each."""


def batch(seed: int) -> tuple[Tensor]:
    return (torch.randn(64, 64, generator=torch.Generator().manual_seed(seed)),)


def made(backend: str, model: nn.Module, **options):
    pytest.importorskip({"onnx": "onnxruntime", "xnnpack": "executorch", "cpu": "torch"}[backend])
    torch.manual_seed(0)
    data = [batch(seed) for seed in range(8)]
    return pq.quantize(
        model.eval(), data[0], calibration_data=data, backend=backend, progress=False, **options
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_artifact_when_numbers_are_drawn_then_each_draw_is_torchs(backend):
    artifact = made(backend, Drawing(), validate=True)
    first, second = artifact.run(*batch(9)), artifact.run(*batch(9))
    torch.testing.assert_close(first["computed"], second["computed"], rtol=0, atol=0)
    for name, (mean, deviation) in MOMENTS.items():
        draws = [found[key] for found in (first, second) for key in (name, f"{name} again")]
        assert all(not torch.equal(draws[0], other) for other in draws[1:]), name
        for drawn in draws:
            # Of 4096 numbers the mean is within 5 standard errors; its spread within a tenth.
            assert abs(float(drawn.mean()) - mean) < 5 * deviation / 64, name
            assert abs(float(drawn.std()) / deviation - 1) < 0.1, name


@pytest.mark.parametrize("backend", BACKENDS)
def test_report_when_numbers_are_drawn_then_it_says_which_results_are_not_compared(backend):
    report = made(backend, Drawing()).report
    told = [note for note in report.notes if "depends on random numbers" in note]
    assert len(told) == 8
    assert not any("computed" in note.split()[0] for note in told)
    assert report.sqnr_float_db > 25
    assert report.sqnr_canonical_db > 30


@pytest.mark.parametrize("backend", BACKENDS)
def test_report_when_all_is_drawn_then_no_distance_is_told(backend):
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(F.dropout(torch.relu(self.first(x)), SHARE, training=True))

    report = made(backend, Noisy()).report
    assert report.sqnr_float_db is None
    assert report.sqnr_canonical_db is None


class Sampled(nn.Module):
    """Sizes that depend on drawn numbers, as durations of speech do, in front of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        kept = (h[:, 0] + torch.randn_like(h[:, 0]) > 0).nonzero().flatten()
        return self.second(torch.relu(h[kept]))


@pytest.mark.parametrize("backend", ["cpu", "onnx"])
def test_quantize_when_sizes_are_drawn_then_it_runs_and_algorithms_say_why_not(backend):
    artifact = made(backend, Sampled())
    assert artifact.run(*batch(9)).shape[1] == 8


def test_gate_when_a_drawn_result_has_another_dtype_then_it_is_named(monkeypatch):
    from pt2e_quant.backends import gate

    run = gate.run_artifact

    def doubled(artifact, leaves):
        return {
            name: value.double() if "normal" in name else value
            for name, value in run(artifact, leaves).items()
        }

    monkeypatch.setattr(gate, "run_artifact", doubled)

    with pytest.raises(ArtifactError, match=r"float64 of 2 dimensions, expected torch\.float32"):
        made("onnx", Drawing())
