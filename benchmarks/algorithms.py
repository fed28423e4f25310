"""What does each algorithm win on the int8 recipes, and how long does its convert take?

Run `python -m benchmarks.algorithms --models mobilenet_v2 resnet18`. Decibels are those of the
converted graph, on data that calibration has not seen.
"""

import argparse
import time
import warnings
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table
from torch.export import ExportedProgram

import pt2e_quant as pq
from benchmarks.cases import CASES, Case
from benchmarks.measure import sqnr_db
from benchmarks.results import write_results

console = Console(width=120)
CHOICES: tuple[tuple[str, ...], ...] = (
    (),
    ("bias_correction",),
    ("analytic_bias_correction",),
    ("batch_norm_reestimation",),
    ("cross_layer_equalization", "bias_correction"),
    ("sequential_mse", "bias_correction"),
    ("gptq",),
    ("gptq", "bias_correction"),
    ("adaround", "bias_correction"),
    ("auto_round", "bias_correction"),
)


def measure(
    case: Case, ep: ExportedProgram, backend: str, names: Sequence[str]
) -> dict[str, object]:
    """Return one row: decibels of the converted graph, and seconds of calibration and convert."""
    quantizer = pq.backends.get(backend).quantizer("int8")
    row: dict[str, object] = {
        "model": case.name,
        "backend": backend,
        "algorithms": "+".join(names) or "none",
        "input_size": case.example[0].shape[-1],
    }
    try:
        prepared = pq.prepare_pt2e(ep, quantizer, algorithms=names)
    except pq.errors.ConfigError as error:
        return {**row, "refused": error.what}
    start = time.process_time()
    pq.calibrate(prepared, case.calibration, progress=False)
    calibrated = time.process_time()
    gm = pq.convert_pt2e(prepared)
    done = time.process_time()
    with torch.no_grad():
        wanted = [case.model(*batch) for batch in case.held_out]
        found = [gm(*batch) for batch in case.held_out]
    return {
        **row,
        "sqnr_db": round(sqnr_db(wanted, found), 2),
        "calibrate_cpu_s": round(calibrated - start, 1),
        "convert_cpu_s": round(done - calibrated, 1),
    }


def show(rows: Sequence[dict[str, object]]) -> None:
    """Print the table."""
    keys = ("model", "backend", "algorithms", "sqnr_db", "convert_cpu_s", "refused")
    table = Table(*keys)
    for row in rows:
        table.add_row(*(str(row.get(key, "")) for key in keys))
    console.print(table)


def main() -> None:
    """Measure what was asked for, print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=["mobilenet_v2", "resnet18"])
    parser.add_argument("--backends", nargs="*", default=["xnnpack", "onnx"])
    parser.add_argument("--algorithms", nargs="*", help="combinations such as gptq+bias_correction")
    parser.add_argument("--image", type=int, default=224)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    asked = options.algorithms
    choices = CHOICES if asked is None else [tuple(n for n in a.split("+") if n) for a in asked]
    rows = []
    for name in options.models:
        case = CASES[name](image=options.image)
        for backend in options.backends:
            for names in choices:
                ep = torch.export.export(case.model, case.example)
                rows.append(measure(case, ep, backend, names))
                console.print(rows[-1])
    show(rows)
    write_results("algorithms", rows, ["model", "backend", "algorithms", "input_size"])


if __name__ == "__main__":
    main()
