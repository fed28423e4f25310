"""Layers in front of a logarithm: found where a signal's transform is, left float by backends."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import pt2e_quant as pq
from pt2e_quant.graph.idioms.spectra import spectral_layers

RATE, WINDOW, HOP, BANDS = 8000, 128, 64, 20


class LogMel(nn.Module):
    """A log-mel spectrogram by a convolution, as models have it that take samples, and a network.

    Args:
        gap: what stands between the squares and the logarithm.
    """

    def __init__(self, gap=lambda x: x.clamp(min=1e-7), *, has_log: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        phases = (
            2 * math.pi * torch.arange(WINDOW) * torch.arange(WINDOW // 2 + 1)[:, None] / WINDOW
        )
        filters = torch.cat([phases.cos(), phases.sin()]) * torch.hann_window(WINDOW)
        self.register_buffer("filters", filters[:, None])
        centers = torch.linspace(1, WINDOW // 2, BANDS)[:, None]
        bands = (1 - (torch.arange(WINDOW // 2 + 1) - centers).abs() / 3).clamp(min=0)
        self.register_buffer("bands", bands)
        self.gap, self.has_log = gap, has_log
        self.body = nn.Sequential(
            nn.Conv1d(BANDS, 32, 3, padding=1), nn.ReLU(), nn.Conv1d(32, 32, 3), nn.ReLU()
        )
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        parts = functional.conv1d(x[:, None], self.filters, stride=HOP).chunk(2, 1)
        power = parts[0].square() + parts[1].square()
        mel = self.gap(functional.linear(power.transpose(1, 2), self.bands))
        mel = mel.log() if self.has_log else mel
        y = self.body(mel.transpose(1, 2))
        return self.head(y.mean(2)).log_softmax(1)


def sounds(count: int, seed: int = 0) -> list[tuple[torch.Tensor]]:
    """Tones whose overtones are a thousand times softer."""
    generator = torch.Generator().manual_seed(seed)
    time = torch.arange(2048) / RATE
    found = []
    for _ in range(count):
        pitches = 100 + 500 * torch.rand(2, 1, generator=generator)
        tones = [
            10 ** (-0.75 * k) * torch.sin(2 * math.pi * (k + 1) * pitches * time) for k in range(5)
        ]
        found.append((sum(tones),))
    return found


def layers(model: nn.Module) -> list[str]:
    program = torch.export.export(model.eval(), sounds(1)[0])
    return [node.name for node in spectral_layers(program.graph)]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (LogMel(), ["conv1d", "linear"]),
        (LogMel(lambda x: x + 1e-6), ["conv1d", "linear"]),
        (LogMel(lambda x: torch.maximum(x, x.amax() * 1e-8)), ["conv1d", "linear"]),
        (LogMel(functional.relu), []),
        (LogMel(lambda x: functional.layer_norm(x, (BANDS,)).exp()), []),
        (LogMel(has_log=False), []),
    ],
    ids=["clamp", "sum", "maximum", "relu", "norm", "no logarithm"],
)
def test_spectral_layers_when_operators_stand_before_a_logarithm_then_those_of_signals(
    model, expected
):
    assert layers(model) == expected


@pytest.mark.parametrize("backend", ["onnx", "xnnpack", "cpu"])
def test_quantize_when_a_logarithm_is_behind_a_spectrum_then_its_layers_stay_float(
    backend, unmeasured
):
    model, data, held = LogMel().eval(), sounds(8), sounds(4, seed=1)
    program = torch.export.export(model, data[0])
    with torch.no_grad():
        expected = [model(*call) for call in held]
    found = {}
    for is_allowed in (False, True):
        target = pq.backends.get(backend).allowing_slower()
        quantizer = target.quantizer("int8")
        if is_allowed:
            quantizer.allowing("spectra")
        prepared = pq.prepare_pt2e(program, quantizer)
        gm = pq.convert_pt2e(pq.calibrate(prepared, data, progress=False))
        artifact = target.lower(gm)
        floats = {f.node: f.reason for f in artifact.report.provenance.floats}
        assert ("logarithm" in floats.get("conv1d", "")) != is_allowed
        found[is_allowed] = pq.sqnr_db(expected, [artifact.run(*call) for call in held])
    assert found[False] > found[True] + 10
    assert found[False] > 25
