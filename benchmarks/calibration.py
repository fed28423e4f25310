"""What does a calibration batch cost over the same batch through the float module?

Run `python -m benchmarks.calibration`. The float module is the exported program's `.module()`.
"""

import argparse
import warnings
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torchao.quantization.pt2e import quantize_pt2e as torchao

import pt2e_quant as pq
from benchmarks import peers
from benchmarks.cases import CASES, Case
from benchmarks.measure import interleave
from benchmarks.results import write_results
from pt2e_quant.flow.annotate.observer_choice import ObserverChoice
from pt2e_quant.observers.static.histogram import HistogramObserver
from pt2e_quant.observers.static.minmax import MinMaxObserver

console = Console(width=120)
# times the float module's forward, per batch; a recipe searches ranges as histograms do
GOALS = {"min-max": 1.3, "histogram": 2.0, "recipe int8": 2.0}
OBSERVERS = {"min-max": MinMaxObserver, "histogram": HistogramObserver}


def prepare_ours(ep: ExportedProgram, observer: str) -> GraphModule:
    """Return our prepared graph with one kind of activation observer, or with the recipe's own."""
    quantizer = pq.backends.get("xnnpack").quantizer("int8")
    if observer in OBSERVERS:
        quantizer.observers = ObserverChoice(activation=OBSERVERS[observer])
        quantizer.algorithms = ()
    return pq.prepare_pt2e(ep, quantizer)


def prepare_torchao(ep: ExportedProgram, observer: str) -> GraphModule:
    """Return torchao's prepared graph with min-max observers, or with its own: histograms."""
    quantizer = peers.xnnpack_quantizer(min_max=observer == "min-max")
    return torchao.prepare_pt2e(ep.module(), quantizer)


def compare(case: Case, observer: str, rounds: int) -> dict[str, object]:
    """Return one row: milliseconds per batch of float, ours and torchao, run in turn."""
    ep = torch.export.export(case.model, case.example)
    modules = {
        "float": ep.module(),
        "ours": prepare_ours(ep, observer),
        "torchao": prepare_torchao(ep, observer),
    }
    calls = {label: replay(module, case) for label, module in modules.items()}
    with torch.no_grad():
        latencies = interleave(calls, rounds=rounds)
    base = latencies["float"].median_ms
    return {
        "model": case.name,
        "observer": observer,
        "input_size": case.example[0].shape[-1],
        "float_ms": round(base, 3),
        "ours": round(latencies["ours"].median_ms / base, 2),
        "torchao": round(latencies["torchao"].median_ms / base, 2),
        "goal": GOALS[observer],
    }


def replay(module: GraphModule, case: Case) -> Callable[[], object]:
    """Return a call that runs the next calibration batch, round and round."""
    position = 0

    def call() -> object:
        nonlocal position
        position += 1
        return module(*case.calibration[position % len(case.calibration)])

    return call


def main() -> None:
    """Measure the asked models with both kinds of observer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=CASES, default=["resnet18", "minilm"])
    parser.add_argument("--image", type=int, default=224, help="side of the square images")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds of each module")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in options.models:
        case = CASES[name](image=options.image)
        rows += [compare(case, observer, options.rounds) for observer in GOALS]
    table = Table(
        "model", "observer", title="one calibration batch, in forwards of the float module"
    )
    for heading in ("float ms", "ours", "torchao", "goal"):
        table.add_column(heading, justify="right")
    for row in rows:
        cells = (
            f"{row['float_ms']}",
            f"{row['ours']}x",
            f"{row['torchao']}x",
            f"<= {row['goal']}x",
        )
        table.add_row(str(row["model"]), str(row["observer"]), *cells)
    console.print(table)
    write_results("calibration", rows, ("model", "observer", "input_size"))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")  # the peers' own
    main()
