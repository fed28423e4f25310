"""What does each algorithm win on the int8 recipes, and how long does its convert take?

Run `python -m benchmarks.algorithms --models mobilenet_v2 resnet18`. Decibels are those of the
converted graph, on data that calibration has not seen; with --run also those of the artifact on
its runtime. Two rows of each model say what no algorithm of weights changes, and what none of
activations does: the graph with activations alone rounded, and with weights alone rounded.
"""

import argparse
import time
import warnings
from collections.abc import Callable, Sequence

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Interpreter, Node

import pt2e_quant as pq
from benchmarks.cases import CASES, Case
from benchmarks.measure import sqnr_db
from benchmarks.results import write_results
from pt2e_quant.graph.meta import attribute
from pt2e_quant.observers.rounding import rounded
from pt2e_quant.observers.statistics.base import Statistics

console = Console(width=120)
KEYS = ("model", "backend", "algorithms", "effort", "input_size")
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


class PartRounded(Interpreter):
    """Runs a calibrated graph with its weights alone rounded, or its activations alone."""

    def __init__(self, gm: GraphModule, *, weights: bool) -> None:
        super().__init__(gm)
        self.weights = weights
        self.node: Node | None = None

    def run_node(self, n: Node) -> object:
        """Run one node."""
        self.node = n
        return super().run_node(n)

    def call_module(self, target: object, args: tuple[object, ...], kwargs: object) -> object:
        """Round what the observer sees, if it is of the part that is meant."""
        assert self.node is not None
        assert isinstance(self.module, GraphModule)
        observer, value = attribute(self.module, str(target)), args[0]
        is_weight = self.node.all_input_nodes[0].op == "get_attr"
        if isinstance(observer, Statistics) or not isinstance(value, Tensor):
            return value
        return rounded(observer, value) if is_weight == self.weights else value


def floors(case: Case, ep: ExportedProgram, backend: str) -> list[dict[str, object]]:
    """Return the two rows of a model with one part of it rounded."""
    quantizer = pq.backends.get(backend).quantizer("int8")
    # gptq reads weights' observers, so that they are in the graph
    prepared = pq.prepare_pt2e(ep, quantizer, algorithms=["gptq"])
    pq.calibrate(prepared, case.calibration, progress=False)
    rows = []
    for what in ("activations", "weights"):
        run = PartRounded(prepared, weights=what == "weights").run
        rows.append({**_named(case, backend, f"{what} alone rounded", "fast"), **_score(case, run)})
    return rows


def measure(
    case: Case, ep: ExportedProgram, backend: str, names: Sequence[str], effort: str, *, run: bool
) -> dict[str, object]:
    """Return one row: decibels of the converted graph, and seconds of calibration and convert."""
    target = pq.backends.get(backend)
    row = _named(case, backend, "+".join(names) or "none", effort)
    try:
        quantizer = target.quantizer("int8")
        prepared = pq.prepare_pt2e(ep, quantizer, algorithms=names, effort=effort)
    except pq.errors.ConfigError as error:
        return {**row, "refused": error.what}
    start = time.process_time()
    pq.calibrate(prepared, case.calibration, progress=False)
    calibrated = time.process_time()
    gm = pq.convert_pt2e(prepared)
    done = time.process_time()
    row |= {
        **_score(case, gm),
        "calibrate_cpu_s": round(calibrated - start, 1),
        "convert_cpu_s": round(done - calibrated, 1),
    }
    if run:
        row["runtime_sqnr_db"] = _score(case, target.lower(gm).run)["sqnr_db"]
    return row


def _named(case: Case, backend: str, algorithms: str, effort: str) -> dict[str, object]:
    return {
        "model": case.name,
        "backend": backend,
        "algorithms": algorithms,
        "effort": effort,
        "input_size": case.example[0].shape[-1],
    }


def _score(case: Case, run: Callable[..., object]) -> dict[str, object]:
    with torch.no_grad():
        wanted = [case.model(*batch) for batch in case.held_out]
        found = [run(*batch) for batch in case.held_out]
    return {"sqnr_db": round(sqnr_db(wanted, found), 2)}


def show(rows: Sequence[dict[str, object]]) -> None:
    """Print the table."""
    keys = ("model", "backend", "algorithms", "effort", "sqnr_db", "runtime_sqnr_db")
    keys = (*keys, "convert_cpu_s", "refused")
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
    parser.add_argument("--effort", default="fast", choices=("fast", "balanced", "best"))
    parser.add_argument("--image", type=int, default=224)
    parser.add_argument("--run", action="store_true", help="run the artifacts too")
    parser.add_argument("--no-floors", action="store_true", help="without one part rounded alone")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    asked = options.algorithms
    choices = CHOICES if asked is None else [tuple(n for n in a.split("+") if n) for a in asked]
    for name in options.models:
        case = CASES[name](image=options.image)
        for backend in options.backends:
            ep = torch.export.export(case.model, case.example)
            rows = [] if options.no_floors else floors(case, ep, backend)
            for names in choices:
                ep = torch.export.export(case.model, case.example)
                rows.append(measure(case, ep, backend, names, options.effort, run=options.run))
                write_results("algorithms", rows, KEYS)
            show(rows)


if __name__ == "__main__":
    main()
