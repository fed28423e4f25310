"""What does it cost that a model writes an activation function out?

    python -m benchmarks.written_activations [--rounds 30]

A network of inverted bottlenecks has one activation in its operator and written out, and is
quantized for each backend with and without the pass that knows written ones (`name_activations`).
The artifacts are called in shuffled rounds, one thread. Times are in microseconds.
"""

import argparse
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pt2e_quant as pq
from benchmarks.measure import interleave
from benchmarks.results import write_results
from pt2e_quant.flow.prepare import prepare_pt2e
from pt2e_quant.passes.cleanup.written_activations import name_activations

Activation = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, tuple[Activation, Activation]] = {
    "silu": (F.silu, lambda x: x * torch.sigmoid(x)),
    "hardswish": (F.hardswish, lambda x: x * F.relu6(x + 3) / 6),
    "gelu": (F.gelu, lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))),
    "gelu, tanh": (
        lambda x: F.gelu(x, approximate="tanh"),
        lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    ),
    "relu": (F.relu, lambda x: x * (x > 0)),
    "leaky_relu": (F.leaky_relu, lambda x: torch.where(x > 0, x, 0.01 * x)),
    "elu": (F.elu, lambda x: torch.where(x > 0, x, torch.exp(x) - 1)),
}
CHANNELS, BLOCKS = 16, 4


class Bottlenecks(nn.Module):
    """Inverted bottlenecks, as MobileNet and EfficientNet have them."""

    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self.activation, wide = activation, 4 * CHANNELS
        self.stem, self.head = nn.Conv2d(3, CHANNELS, 3, 2, 1), nn.Linear(CHANNELS, 10)
        self.widen = nn.ModuleList(nn.Conv2d(CHANNELS, wide, 1) for _ in range(BLOCKS))
        self.spread = nn.ModuleList(
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide) for _ in range(BLOCKS)
        )
        self.narrow = nn.ModuleList(nn.Conv2d(wide, CHANNELS, 1) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        """Ten classes."""
        x = self.activation(self.stem(x))
        for widen, spread, narrow in zip(self.widen, self.spread, self.narrow, strict=True):
            x = x + narrow(self.activation(spread(self.activation(widen(x)))))
        return self.head(x.mean((2, 3)))


@contextmanager
def unnamed() -> Iterator[None]:
    """Without the pass."""
    passes = prepare_pt2e.PREPARE_PASSES
    prepare_pt2e.PREPARE_PASSES = tuple(p for p in passes if p is not name_activations)
    try:
        yield
    finally:
        prepare_pt2e.PREPARE_PASSES = passes


def artifact(activation: Activation, backend: str, x: Tensor) -> pq.Artifact:
    """A network with an activation, quantized."""
    torch.manual_seed(0)
    model = Bottlenecks(activation).eval()
    return pq.quantize(
        model, (x,), calibration_data=[(x,)], backend=backend, effort="fast", progress=False
    )


def measure(name: str, backend: str, rounds: int) -> dict[str, object]:
    """One row: the operator, what is written out, and that without the pass."""
    x = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    operator, written = ACTIVATIONS[name]
    made = {key: artifact(a, backend, x) for key, a in (("operator", operator), ("named", written))}
    with unnamed():
        made["written"] = artifact(written, backend, x)
    calls = {key: (lambda a: lambda: a.run(x))(one) for key, one in made.items()}
    times = {k: v.median_ms * 1e3 for k, v in interleave(calls, rounds=rounds).items()}
    return {
        "activation": name,
        "backend": backend,
        **{f"{key}_us": round(value) for key, value in times.items()},
        "times_as_fast": round(times["written"] / times["named"], 2),
    }


def main() -> None:
    """Measure all and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    for backend in ("onnx", "xnnpack", "cpu"):
        for name in ACTIVATIONS:
            row = measure(name, backend, rounds)
            print(row, flush=True)
            write_results("written_activations", [row], ("activation", "backend"))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")  # others' own
    with torch.no_grad():
        main()
