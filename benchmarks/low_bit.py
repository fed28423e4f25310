"""What do 4-bit and dynamic recipes cost and give a sentence encoder, against the peers' files?

Run `python -m benchmarks.low_bit`; `--no-write` leaves `results/low_bit.json` alone.
"""

import argparse
import logging
import warnings
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import peers_low_bit as peers
from benchmarks.accuracy_speed import Row, identity, make_row
from benchmarks.cases import Case, minilm_case
from benchmarks.measure import interleave, mean_cosine, sqnr_db
from benchmarks.ours import LABEL, quantize_without_data
from benchmarks.results import write_results
from benchmarks.runtimes import Program, Runtime

RECIPES = {
    Runtime.EXECUTORCH: ("int8_dynamic", "a8w4", "a8w4_g32", "a8w4_g128", "w4"),
    Runtime.ONNXRUNTIME: ("int8_dynamic", "a8w4_g32", "a8w4_g128", "w4_g32", "w4_g128"),
}
GROUPS = (32, 128)
console = Console(width=150)
Makers = dict[str, Callable[[], Program]]


def executorch_makers(case: Case) -> Makers:
    """Return the peers on ExecuTorch; its XNNPACK lowering takes no weight-only linears."""
    model, how = case.model, peers.plain_exporter(case.example)
    found: Makers = {
        "XNNPACKQuantizer dynamic": lambda: peers.executorch_int8_dynamic(model, how),
        "torchao 8da8w": lambda: peers.executorch_quantize(model, how, None, bits=8),
    }
    for size in (None, *GROUPS):
        label = "torchao 8da4w" + (f" g{size}" if size else "")
        found[label] = lambda size=size: peers.executorch_quantize(model, how, size)
    return found


def onnx_makers(floating: Program) -> Makers:
    """Return the peers on ONNX Runtime, from its float file."""
    data = floating.data
    found: Makers = {"quantize_dynamic": lambda: peers.onnx_dynamic(data)}
    for size in GROUPS:
        for algorithm in peers.ALGORITHMS:
            for level, kind in peers.ACCURACY_LEVELS.items():
                label = f"MatMulNBits g{size} {algorithm} {kind}"
                found[label] = lambda size=size, level=level, algorithm=algorithm: (
                    peers.onnx_matmul_nbits(data, size, level, algorithm=algorithm)
                )
    return found


def build(case: Case, runtime: Runtime, recipes: tuple[str, ...]) -> tuple[list[Program], Makers]:
    """Return the float program, and makers of all others by label: ours first."""
    how = peers.plain_exporter(case.example)
    is_executorch = runtime is Runtime.EXECUTORCH
    floating = (peers.executorch_float if is_executorch else peers.onnx_float)(case.model, how)
    makers: Makers = {
        f"{LABEL} {recipe}": lambda recipe=recipe: quantize_without_data(
            runtime, case.model, case.example, recipe
        )
        for recipe in recipes
    }
    return [floating], makers | (
        executorch_makers(case) if is_executorch else onnx_makers(floating)
    )


def measure_runtime(
    case: Case, runtime: Runtime, recipes: tuple[str, ...], rounds: int
) -> list[Row]:
    """Build, judge and time every program of one runtime; return one row for each."""
    programs, makers = build(case, runtime, recipes)
    rows: list[Row] = []
    for label, make in makers.items():
        console.print(f"{runtime}: building {label}")
        try:
            programs.append(make())
        except Exception as error:  # what cannot take the model is a result, not an abort
            reason = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
            rows.append({**identity(case, runtime, label), "failure": reason})
            logging.getLogger(__name__).error("%s on %s", label, runtime, exc_info=error)
    with torch.no_grad():
        reference = [case.model(*batch) for batch in case.held_out]
    bound = {program.label: program.bind(*case.example) for program in programs}
    latencies = interleave(bound, rounds=rounds)
    for program in programs:
        outputs = [program.run(*batch)[0] for batch in case.held_out]
        quality = (sqnr_db(reference, outputs), mean_cosine(reference, outputs))
        rows.append(make_row(case, programs[0], program, quality, latencies))
    return rows


def show(rows: list[Row]) -> None:
    """Print one table: a line for each program."""
    table = Table("model", "runtime", "program", title="files without calibration, batch 1")
    columns = ("sqnr_db", "cosine", "median_ms", "speed_up", "size_bytes", "size_ratio")
    for heading in ("dB", "cosine", "median ms", "x float", "bytes", "of float", "outside"):
        table.add_column(heading, justify="right")
    for row in rows:
        names = (str(row["model"]), str(row["runtime"]), str(row["program"]))
        if "failure" in row:
            table.add_row(*names, f"[red]{row['failure']}[/]")
            continue
        ops = row["ops"]
        assert isinstance(ops, dict)  # written by make_row
        table.add_row(*names, *(str(row[key]) for key in columns), str(ops["undelegated"]))
    console.print(table)


def main() -> None:
    """Measure trained MiniLM on the asked runtimes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runtimes", nargs="+", choices=list(Runtime), default=list(Runtime))
    parser.add_argument("--recipes", nargs="+", help="instead of the five of each runtime")
    parser.add_argument("--rounds", type=int, default=50, help="timed rounds of each program")
    parser.add_argument("--no-write", action="store_true", help="leave the results file alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    case = minilm_case(image=0)
    for runtime in map(Runtime, options.runtimes):
        recipes = tuple(options.recipes or RECIPES[runtime])
        rows = measure_runtime(case, runtime, recipes, options.rounds)
        show(rows)
        if not options.no_write:
            write_results("low_bit", rows, tuple(identity(case, runtime, "")))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")  # the peers' own
    logging.getLogger("root").setLevel(logging.ERROR)
    main()
