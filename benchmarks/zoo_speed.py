"""How fast and small are the models of `benchmarks.effort` in int8, beside float and the peers?

    python -m benchmarks.zoo_speed [--models unet vit] [--runtimes onnxruntime executorch cpu]

Each model is quantized as it comes (recipe `int8`, the default effort unless `--effort` names
another), and so are the peers: `quantize_static` on ONNX Runtime, XNNPACKQuantizer on ExecuTorch,
and on the CPU the float module as it is called, which is what the cpu backend's module takes the
place of. `--compiled` adds torch.compile of float, of X86InductorQuantizer's graph and of ours.
All programs of one runtime are timed in shuffled rounds, one thread, and loaded anew several times.
"""

import argparse
import logging
from collections.abc import Callable, Mapping
from multiprocessing import get_context

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import pt2e_quant as pq
from benchmarks import peers
from benchmarks.cpu import compiled
from benchmarks.effort import x86
from benchmarks.effort_zoo import FINAL, TUNED, Batches, build
from benchmarks.measure import Latency, Stopwatch, interleave, interleave_loads
from benchmarks.ours import LABEL, through_file
from benchmarks.results import write_results
from benchmarks.runtimes import Program, Runtime, load_program

CPU = "cpu"
FLOAT = "float"
COMPILED = ", torch.compile"
ROUNDS = 200
TIE = 0.03
"""Ratios of times that differ by less count as equal."""

Row = dict[str, object]
Load = Callable[[], Callable[[], object]]


def quantize(backend: str, model: nn.Module, calibration: Batches, effort: str | None) -> object:
    """Return this package's artifact of one backend."""
    made = pq.backends.get(backend)
    exported = torch.export.export(model, calibration[0])
    prepared = pq.prepare_pt2e(exported, made.quantizer("int8"), effort=effort)
    pq.calibrate(prepared, calibration, progress=False)
    return made.lower(pq.convert_pt2e(prepared))


def programs_of_file(
    runtime: Runtime, model: nn.Module, calibration: Batches, effort: str | None
) -> dict[str, Callable[[], Program]]:
    """Return what makes each program that is a file, by label."""
    example = calibration[0]
    if runtime is Runtime.EXECUTORCH:
        return {
            FLOAT: lambda: peers.executorch_float(model, example),
            LABEL: lambda: through_file(
                LABEL, runtime, quantize("xnnpack", model, calibration, effort), ".pte", Stopwatch()
            ),
            "XNNPACKQuantizer": lambda: peers.executorch_int8(model, example, calibration),
        }
    return {
        FLOAT: lambda: peers.onnx_float(model, example),
        LABEL: lambda: through_file(
            LABEL, runtime, quantize("onnx", model, calibration, effort), ".onnx", Stopwatch()
        ),
        "quantize_static": lambda: peers.onnx_static(
            peers.onnx_float(model, example).data, calibration
        ),
    }


def attempt(
    makers: Mapping[str, Callable[[], object]], name: str
) -> tuple[dict[str, object], dict[str, str]]:
    """Return what could be made by label, and why the others could not."""
    found: dict[str, object] = {}
    failures: dict[str, str] = {}
    for label, make in makers.items():
        try:
            found[label] = make()
        except Exception as error:  # a peer that cannot take a model is a result, not an abort
            failures[label] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
            logging.getLogger(__name__).error("%s on %s", label, name, exc_info=error)
    return found, failures


def measure_files(
    name: str, runtime: Runtime, rounds: int, effort: str | None, draw: int = 0
) -> list[Row]:
    """Return one row for each program of one model on a runtime of files."""
    model, calibration, _ = build(name, draw)
    found, failures = attempt(programs_of_file(runtime, model, calibration, effort), name)
    example = calibration[0]
    for label in [one for one in found if one not in (FLOAT, LABEL)]:
        code = run_apart(found[label], example)
        if code:
            failures[label] = f"its file ends the process that runs it (exit code {code})"
            del found[label]
    loads: dict[str, Load] = {
        label: lambda p=program: p.reload().bind(*example) for label, program in found.items()
    }
    latencies = interleave_loads(loads, rounds=rounds)
    sizes = {label: program.size_bytes for label, program in found.items()}
    return rows_of(name, runtime.value, latencies, sizes, failures)


def run_apart(program: Program, example: tuple[Tensor, ...]) -> int | None:
    """Return the exit code of a process of its own that runs a peer's program: 0 if it survives."""
    given = (program.label, program.runtime, program.data, example)
    process = get_context("spawn").Process(target=run_once, args=given)
    process.start()
    process.join()
    return process.exitcode


def run_once(label: str, runtime: Runtime, data: bytes, example: tuple[Tensor, ...]) -> None:
    """Run a program on one input."""
    load_program(label, runtime, data).run(*example)


def measure_cpu(name: str, rounds: int, effort: str | None, with_compile: bool) -> list[Row]:
    """Return one row for each program of one model in torch on this CPU."""
    model, calibration, _ = build(name)
    example = calibration[0]

    def ours(compile_it: bool) -> Callable[[], object]:
        artifact = quantize(CPU, model, calibration, effort)
        if compile_it:
            artifact.compile()
        return lambda: artifact.run_leaves(example)

    makers: dict[str, Callable[[], Callable[[], object]]] = {
        FLOAT: lambda: lambda: model(*example),
        LABEL: lambda: ours(compile_it=False),
    }
    if with_compile:
        makers[LABEL + COMPILED] = lambda: ours(compile_it=True)
        makers["X86InductorQuantizer" + COMPILED] = lambda: bind(
            compiled(x86(model, calibration), example), example
        )
        makers[FLOAT + COMPILED] = lambda: bind(compiled(model, example), example)
    found, failures = attempt(makers, name)
    with torch.no_grad():
        latencies = interleave(found, rounds=rounds)
    return rows_of(name, CPU, latencies, {}, failures)


def bind(call: Callable[..., object], example: tuple[Tensor, ...]) -> Callable[[], object]:
    """Return the call on its inputs."""
    return lambda: call(*example)


def rows_of(
    name: str,
    runtime: str,
    latencies: Mapping[str, Latency],
    sizes: Mapping[str, int],
    failures: Mapping[str, str],
) -> list[Row]:
    """Return the JSON rows: times in ms, and how many times as fast as float, alike compiled."""
    same = {"model": name, "half": "tuned" if name in TUNED else "final", "runtime": runtime}
    rows: list[Row] = [{**same, "program": key, "failure": why} for key, why in failures.items()]
    for label, latency in latencies.items():
        base = FLOAT + COMPILED if label.endswith(COMPILED) else FLOAT
        row = {**same, "program": label, "median_ms": round(latency.median_ms, 4)}
        if base in latencies:
            row["speed_up"] = round(latencies[base].median_ms / latency.median_ms, 3)
        if label in sizes:
            row["size_bytes"] = sizes[label]
        if label in sizes and FLOAT in sizes:
            row["size_ratio"] = round(sizes[label] / sizes[FLOAT], 3)
        rows.append(row)
    return rows


def show(rows: list[Row], console: Console) -> None:
    """Print a line a model and runtime, and how many are slower than float or than a peer."""
    table = Table(title="Times as fast as float (share of its size)")
    columns = ("model", "runtime", "program", "ms", "speed", "size")
    for column in columns:
        table.add_column(column)
    for row in rows:
        figures = (str(row.get(key, "")) for key in ("median_ms", "speed_up", "size_ratio"))
        table.add_row(str(row["model"]), str(row["runtime"]), str(row["program"]), *figures)
    console.print(table)
    for runtime in dict.fromkeys(str(row["runtime"]) for row in rows):
        mine, best = {}, {}
        for row in rows:
            if row["runtime"] == runtime and "speed_up" in row and COMPILED not in row["program"]:
                name = str(row["model"])
                if row["program"] == LABEL:
                    mine[name] = float(row["speed_up"])
                elif row["program"] != FLOAT:
                    best[name] = float(row["speed_up"])
        slower = [f"{name} {value}" for name, value in mine.items() if value < 1 - TIE]
        behind = [
            f"{name} {mine[name] / value:.2f}"
            for name, value in best.items()
            if name in mine and mine[name] < 0.95 * value
        ]
        console.print(f"{runtime}: {len(mine)} models; slower than float: {slower or 'none'}")
        console.print(f"{runtime}: more than 5 % slower than the peer: {behind or 'none'}")


def main() -> None:
    """Measure what is asked for and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--half", choices=("tuned", "final", "both"), default="both")
    parser.add_argument("--models", nargs="*")
    parser.add_argument(
        "--runtimes", nargs="*", default=[*(runtime.value for runtime in Runtime), CPU]
    )
    parser.add_argument("--effort", choices=("fast", "balanced", "best"))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--compiled", action="store_true", help="torch.compile too, on the CPU")
    given = parser.parse_args()
    torch.set_num_threads(1)
    halves = {"tuned": TUNED, "final": FINAL, "both": TUNED | FINAL}
    rows: list[Row] = []
    for name in given.models or list(halves[given.half]):
        for runtime in given.runtimes:
            found = (
                measure_cpu(name, given.rounds, given.effort, given.compiled)
                if runtime == CPU
                else measure_files(name, Runtime(runtime), given.rounds, given.effort)
            )
            rows += found
            speeds = (f"{r['program']}={r.get('speed_up', 'failed')}" for r in found)
            print(name, runtime, *speeds, flush=True)
            write_results("zoo_speed", found, ("model", "runtime", "program"))
    show(rows, Console(width=150))


if __name__ == "__main__":
    main()
