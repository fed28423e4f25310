"""What does `artifact.run` cost above the call of the runtime that it makes?

Run `python -m benchmarks.run_overhead`. The digits CNN and a network of two inputs and two results
are lowered to every backend. `artifact.run` and the runtime's own call (`InferenceSession.run` on
arrays, the method of ExecuTorch, the generated function of the fused module) are timed in turn in
one process, on one thread; the difference of the medians is what the face costs.
"""

import argparse
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import pt2e_quant as pq
from benchmarks.cases import digits_case
from benchmarks.measure import interleave
from benchmarks.results import write_results
from pt2e_quant.backends.artifact import Artifact
from pt2e_quant.backends.cpu.artifact import flat_call
from pt2e_quant.backends.xnnpack.load_program import load_program

console = Console(width=120)
Inputs = tuple[Tensor, ...]
RawCall = Callable[[], object]
GOAL_US = 8.0


class Pair(nn.Module):
    """Two inputs and two results, small enough that a call is mostly the way to it."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Map two float[1, 16] to two."""
        left = torch.relu(self.left(x))
        return left, self.right(y) + left


@functools.cache
def digits() -> tuple[nn.Module, list[Inputs]]:
    """Return the trained CNN of the quickstart and its batches."""
    case = digits_case(8)
    return case.model, [*case.calibration[:16]]


def pair() -> tuple[nn.Module, list[Inputs]]:
    """Return the network of two inputs and its batches."""
    torch.manual_seed(0)
    return Pair().eval(), [(torch.randn(1, 16), torch.randn(1, 16)) for _ in range(16)]


MODELS = {"digits": digits, "pair": pair}


def raw_onnx(artifact: Any, inputs: Inputs) -> RawCall:
    """Return a call of the session on arrays that are ready."""
    artifact.limit_threads(1)
    session = artifact.session
    names = [declared.name for declared in session.get_inputs()]
    feeds = {name: value.numpy() for name, value in zip(names, inputs, strict=True)}
    return lambda: session.run(None, feeds)


def raw_xnnpack(artifact: Any, inputs: Inputs) -> RawCall:
    """Return a call of the program's method."""
    program = load_program(artifact.pte)
    method = program.load_method("forward")
    given = list(inputs)
    return lambda keep=program: method.execute(given)


def raw_cpu(artifact: Any, inputs: Inputs) -> RawCall:
    """Return a call of the fused module as one function."""
    call = flat_call(artifact.module)
    return lambda: call(inputs)


RAW: dict[str, Callable[[Any, Inputs], RawCall]] = {
    "onnx": raw_onnx,
    "xnnpack": raw_xnnpack,
    "cpu": raw_cpu,
}


def lower(backend: str, model: nn.Module, batches: list[Inputs]) -> Artifact:
    """Return the model's artifact."""
    target: Any = pq.backends.get(backend)
    if backend == "cpu":
        target = target.allowing_slower()
    artifact: Artifact = pq.quantize(
        model, args=batches[0], calibration_data=batches, backend=target
    )
    return artifact


def measure(name: str, backend: str, rounds: int) -> dict[str, object]:
    """Return one row: a model in one backend."""
    model, batches = MODELS[name]()
    artifact, inputs = lower(backend, model, batches), batches[0]
    calls = {"run": lambda: artifact.run(*inputs), "raw": RAW[backend](artifact, inputs)}
    times = interleave(calls, rounds=rounds, warmup=50)
    run_us, raw_us = (1e3 * times[label].median_ms for label in ("run", "raw"))
    return {
        "model": name,
        "backend": backend,
        "run_us": round(run_us, 1),
        "runtime_us": round(raw_us, 1),
        "overhead_us": round(run_us - raw_us, 1),
        "goal_us": GOAL_US,
    }


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--backends", nargs="+", choices=RAW, default=list(RAW))
    parser.add_argument("--rounds", type=int, default=3000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("model", "backend", "run us", "runtime us", "overhead us", "goal us")
    rows = [
        measure(name, backend, options.rounds)
        for name in options.models
        for backend in options.backends
    ]
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    console.print(table)
    console.print(write_results(Path(__file__).stem, rows, ("model", "backend")))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")  # the peers' own
    main()
