"""How good, fast and small is an int8 file, against the peers' files on the same runtime?

Run `python -m benchmarks.accuracy_speed --models digits resnet18 --image 224`.
"""

import argparse
import logging
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import ours, peers
from benchmarks.cases import CASES, Case
from benchmarks.count_ops import OpCount, count_ops
from benchmarks.measure import Latency, interleave_loads, mean_cosine, sqnr_db
from benchmarks.results import write_results
from benchmarks.runtimes import Program, Runtime

console = Console(width=150)
Row = dict[str, object]


def build_programs(case: Case, runtime: Runtime) -> tuple[dict[str, Program], dict[str, str]]:
    """Return the programs of one runtime by label, the float one first, and what failed, why."""
    model, example, batches = case.model, case.example, case.calibration
    programs: dict[str, Program] = {}
    failures: dict[str, str] = {}
    is_executorch = runtime is Runtime.EXECUTORCH
    base = peers.executorch_float if is_executorch else peers.onnx_float
    programs["float"] = base(model, example)
    makers: dict[str, Callable[[], Program]] = {
        ours.LABEL: lambda: ours.quantize_int8(runtime, model, example, batches)
    }
    if is_executorch:
        makers["torchao + XNNPACKQuantizer"] = lambda: peers.executorch_int8(
            model, example, batches
        )
    else:
        data = programs["float"].data
        makers["torchao PT2E -> ONNX"] = lambda: peers.torchao_onnx(model, example, batches)
        makers["quantize_static"] = lambda: peers.onnx_static(data, batches)
        if case.is_transformer:
            makers["quantize_static, MatMul only"] = lambda: peers.onnx_static(
                data, batches, matmul_only=True
            )
    for label, make in makers.items():
        try:
            programs[label] = make()
        except Exception as error:  # a peer that cannot take a model is a result, not an abort
            failures[label] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
            logging.getLogger(__name__).error("%s on %s", label, case.name, exc_info=error)
    return programs, failures


def measure_runtime(case: Case, runtime: Runtime, rounds: int) -> list[Row]:
    """Build every program of one runtime and return one row for each."""
    programs, failures = build_programs(case, runtime)
    with torch.no_grad():
        reference = [case.model(*batch) for batch in case.held_out]
    loaders = {
        label: lambda p=program: p.reload().bind(*case.example)
        for label, program in programs.items()
    }
    latencies = interleave_loads(loaders, rounds=rounds)
    rows: list[Row] = [
        {**identity(case, runtime, label), "failure": reason} for label, reason in failures.items()
    ]
    for program in programs.values():
        outputs = [program.run(*batch)[0] for batch in case.held_out]
        quality = (sqnr_db(reference, outputs), mean_cosine(reference, outputs))
        rows.append(make_row(case, programs["float"], program, quality, latencies))
    return rows


def identity(case: Case, runtime: Runtime, label: str) -> Row:
    """Return the fields that tell one measurement from another."""
    size = case.example[0].shape[-1]
    return {"model": case.name, "runtime": str(runtime), "program": label, "input_size": size}


def make_row(
    case: Case,
    floating: Program,
    program: Program,
    quality: tuple[float, float],
    latencies: Mapping[str, Latency],
) -> Row:
    """Return what the table and the JSON say about one program."""
    latency = latencies[program.label]
    ops: OpCount = count_ops(program)
    return {
        **identity(case, program.runtime, program.label),
        "sqnr_db": round(quality[0], 2) if math.isfinite(quality[0]) else str(quality[0]),
        "cosine": round(quality[1], 5),
        "median_ms": round(latency.median_ms, 3),
        "min_ms": round(latency.min_ms, 3),
        "speed_up": round(latencies["float"].median_ms / latency.median_ms, 2),
        "size_bytes": program.size_bytes,
        "size_ratio": round(program.size_bytes / floating.size_bytes, 3),
        "ops": asdict(ops),
        "stages_s": {stage: round(seconds, 2) for stage, seconds in program.stages.items()},
    }


def show(rows: list[Row]) -> None:
    """Print one table: a line for each program."""
    table = Table("model", "runtime", "program", title="int8 files against float, batch 1")
    headings = ("dB", "cosine", "median ms", "speed-up", "size", "conv i/f", "linear", "add")
    for heading in (*headings, "q/dq left", "partitions"):
        table.add_column(heading, justify="right")
    for row in rows:
        names = (str(row["model"]), str(row["runtime"]), str(row["program"]))
        if "failure" in row:
            table.add_row(*names, "[red]failed[/]")
            continue
        ops = OpCount(**row["ops"])  # type: ignore[arg-type]  # written by asdict above
        figures = (str(row[key]) for key in ("sqnr_db", "cosine", "median_ms"))
        counts = (ops.ratio(kind) for kind in ("conv", "linear", "add"))
        table.add_row(
            *names,
            *figures,
            f"{row['speed_up']}x",
            f"{row['size_ratio']}x",
            *counts,
            str(ops.quantize_dequantize),
            str(ops.partitions),
        )
    console.print(table)
    for row in rows:
        if "failure" in row:
            console.print(f"{row['program']} failed: {row['failure']}", style="red")


def main() -> None:
    """Measure the asked models on the asked runtimes, model by model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--runtimes", nargs="+", choices=list(Runtime), default=list(Runtime))
    parser.add_argument("--image", type=int, default=224, help="side of the square images")
    parser.add_argument("--rounds", type=int, default=50, help="timed rounds of each program")
    parser.add_argument("--into", default="accuracy_speed", help="the name of the record")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.models:
        console.print(f"[bold]{name}[/]: building the model and its data")
        case = CASES[name](image=options.image)
        for runtime in map(Runtime, options.runtimes):
            rows = measure_runtime(case, runtime, options.rounds)
            show(rows)
            write_results(options.into, rows, tuple(identity(case, runtime, "")))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")  # the peers' own
    logging.getLogger("root").setLevel(logging.ERROR)
    main()
