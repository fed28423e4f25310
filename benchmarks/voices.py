"""Trained networks on voices, whose features differ by orders of magnitude.

    pip install --no-deps --target build/voices Resemblyzer==0.1.4 silero-vad==6.2.3
    PYTHONPATH=build/voices python -m benchmarks.voices [--rounds 30]

A speaker encoder (three LSTM layers on powers of a mel spectrum) and a voice detector (a Fourier
transform by a convolution, four convolutions, an LSTM cell), with the weights that their packages
ship. The voices are drawn: harmonics under moving formants, with pauses and noise. `plain` is ours
without `keep_float` and without scaling what recurrent layers read (`smooth_quant`), `float` the
module itself. Each figure is of an artifact in its runtime: the SQNR of its results on calls that
calibration has not seen, the least of them where there are several, and the time of a call of one
voice, in shuffled rounds on one thread.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import pt2e_quant as pq
from benchmarks.measure import interleave
from benchmarks.results import write_results
from pt2e_quant.core.export import export

RATE = 16000
"""Samples of sound in a second."""
MELS, WINDOW, HOP = 40, 400, 160
LEFT_OUT = ("keep_float", "smooth_quant")
BACKENDS = {"onnx": "onnxruntime", "xnnpack": "executorch", "cpu": "cpu"}
Batches = list[tuple[Tensor, ...]]


def shipped(package: str, *path: str) -> Path:
    """Return a file that a package has, without importing the package."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f'the package "{package}" is not installed: see the top of this file')
    return Path(spec.submodule_search_locations[0]).joinpath(*path)


class SpeakerEncoder(nn.Module):
    """Resemblyzer's network: a vector of length 1 for each voice [N, steps, 40 mels]."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.linear = nn.LSTM(MELS, 256, 3, batch_first=True), nn.Linear(256, 256)
        found = torch.load(shipped("resemblyzer", "pretrained.pt"), map_location="cpu")
        self.load_state_dict(found["model_state"], strict=False)

    def forward(self, mels: Tensor) -> Tensor:
        """Return float32[N, 256]."""
        _, (hidden, _) = self.lstm(mels)
        raw = torch.relu(self.linear(hidden[-1]))
        return raw / torch.norm(raw, dim=1, keepdim=True)


class VoiceDetector(nn.Module):
    """silero-vad's network: how likely a chunk [N, 576] holds a voice, and the cell's states."""

    def __init__(self) -> None:
        super().__init__()
        from safetensors.torch import load_file

        self.stft = nn.Conv1d(1, 258, 256, stride=128, bias=False)
        sizes = ((129, 128, 1), (128, 64, 2), (64, 64, 2), (64, 128, 1))
        self.convs = nn.ModuleList(nn.Conv1d(i, o, 3, s, padding=1) for i, o, s in sizes)
        self.cell, self.last = nn.LSTMCell(128, 128), nn.Conv1d(128, 1, 1)
        found = load_file(shipped("silero_vad", "data", "silero_vad_16k.safetensors"))
        names = {"stft_conv": "stft", "lstm_cell": "cell", "final_conv": "last"}
        names |= {f"conv{n + 1}": f"convs.{n}" for n in range(4)}
        for name, value in found.items():
            layer, leaf = name.split(".")
            self.get_parameter(f"{names[layer]}.{leaf}").data = value

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return float32[N, 1] and the states float32[N, 128] each."""
        x = self.stft(F.pad(x.unsqueeze(1), (0, 64), mode="reflect"))
        x = torch.sqrt(x[:, :129] ** 2 + x[:, 129:] ** 2)
        for conv in self.convs:
            x = torch.relu(conv(x))
        h, c = self.cell(x.squeeze(-1), (h, c))
        return torch.sigmoid(self.last(torch.relu(h).unsqueeze(-1))).mean(-1), h, c


def voice(seed: int, seconds: float) -> Tensor:
    """Return float32[seconds * RATE]: vowels with pauses, and faint noise."""
    draw = torch.Generator().manual_seed(seed)
    count = int(seconds * RATE)
    time = torch.arange(count) / RATE
    a, b, c, d, e = torch.rand(5, generator=draw).tolist()
    pitch = 100 + 80 * a + 20 * torch.sin(2 * math.pi * (1 + 2 * b) * time)
    formants = (
        300 + 600 * c + 150 * torch.sin(2 * math.pi * 3 * time),
        1000 + 1200 * d + 300 * torch.sin(2 * math.pi * 2 * time + 1),
        2600 + 300 * torch.sin(2 * math.pi * 1.5 * time),
    )
    phase, sound = torch.cumsum(2 * math.pi * pitch / RATE, 0), torch.zeros(count)
    for k in range(1, 30):
        loudness = sum(1 / (1 + ((k * pitch - f) / 90) ** 2) for f in formants)
        sound += loudness * torch.sin(k * phase) / math.sqrt(k)
    speaks = (torch.sin(2 * math.pi * 3.1 * time + 6 * e) > -0.3).float()
    smooth = F.avg_pool1d(speaks[None, None], 401, 1, 200)[0, 0]
    return 0.1 * sound * smooth + 0.003 * torch.randn(count, generator=draw)


def mel_powers(sound: Tensor) -> Tensor:
    """Return float32[steps, MELS]: powers in triangular bands of equal width in mel."""
    window = torch.hann_window(WINDOW)
    powers = torch.stft(sound, WINDOW, HOP, window=window, return_complex=True).abs() ** 2
    most = 2595 * math.log10(1 + RATE / 2 / 700)
    edges = 700 * (10 ** (torch.linspace(0, most, MELS + 2) / 2595) - 1)
    at = torch.linspace(0, RATE / 2, WINDOW // 2 + 1)
    low, middle, high = (edges[n : n + MELS, None] for n in range(3))
    bands = torch.minimum((at - low) / (middle - low), (high - at) / (high - middle)).clamp(min=0)
    return (bands * 2 / (high - low) @ powers).T


def speaker_calls() -> Batches:
    """Return eight calls of four voices of 1.6 seconds."""
    spectra = [mel_powers(voice(seed, 1.6))[:160] for seed in range(32)]
    return [(torch.stack(spectra[at : at + 4]),) for at in range(0, 32, 4)]


def detector_calls(model: nn.Module) -> Batches:
    """Return eight times six chunks of four voices, each with the states that the last one left."""
    made: Batches = []
    for at in range(8):
        sound = torch.stack([voice(100 + 10 * at + n, 1.0) for n in range(4)])
        states = torch.zeros(4, 128), torch.zeros(4, 128)
        for start in range(0, 6 * 512, 512):
            made.append((sound[:, start : start + 576], *states))
            with torch.no_grad():
                _, *left = model(*made[-1])
            states = left[0], left[1]
    return made


def artifact(
    program: torch.export.ExportedProgram, backend: str, batches: Batches, left_out: Sequence[str]
) -> pq.Artifact:
    """Return ours, without some of the recipe's algorithms."""
    target = pq.backends.get(backend)
    quantizer = target.quantizer("int8")
    for name in left_out:
        if any(algorithm.name == name for algorithm in quantizer.algorithms):
            quantizer.remove_algorithm(name)
    prepared = pq.prepare(program, quantizer)
    return target.lower(pq.convert(pq.calibrate(prepared, batches, progress=False)))


def least_db(expected: Sequence[object], found: Sequence[object]) -> float | None:
    """Return the SQNR of that result of some calls which is furthest off; None if all are equal."""
    leaves = [[pytree.tree_leaves(value) for value in values] for values in (expected, found)]
    columns = zip(zip(*leaves[0], strict=True), zip(*leaves[1], strict=True), strict=True)
    found = min(pq.sqnr_db(a, b) for a, b in columns)
    return round(found, 1) if math.isfinite(found) else None


def measure(name: str, model: nn.Module, calls: Batches, rounds: int) -> list[dict[str, object]]:
    """Return a row for each runtime and way."""
    held_out = len(calls) // 4
    calibration, new = calls[:-held_out], calls[-held_out:]
    batch = torch.export.Dim("batch", min=1, max=8)
    shapes = tuple({0: batch} for _ in calls[0])
    program = export(model, calls[0], dynamic_shapes=shapes)
    one = tuple(x[:1] for x in calls[0])
    with torch.no_grad():
        expected = [model(*call) for call in new]
    rows: list[dict[str, object]] = []
    for backend, runtime in BACKENDS.items():
        ways: dict[str, Callable[..., object]] = {
            "ours": artifact(program, backend, calibration, ()).run,
            "plain": artifact(program, backend, calibration, LEFT_OUT).run,
            "float": model,
        }
        with torch.no_grad():
            found = {
                way: least_db(expected, [run(*call) for call in new]) for way, run in ways.items()
            }
            timed = {way: lambda run=run: run(*one) for way, run in ways.items()}
            latencies = interleave(timed, rounds=rounds)
        for way, latency in latencies.items():
            row = {"model": name, "runtime": runtime, "way": way, "db": found[way]}
            rows.append(row | {"ms": round(latency.median_ms, 3)})
            Console(width=120).print(rows[-1])
    return rows


def main() -> None:
    """Measure both, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    encoder, detector = SpeakerEncoder().eval(), VoiceDetector().eval()
    rows = measure("speaker encoder", encoder, speaker_calls(), arguments.rounds)
    rows += measure("voice detector", detector, detector_calls(detector), arguments.rounds)
    write_results("voices", rows, keys=("model", "runtime", "way"))


if __name__ == "__main__":
    main()
