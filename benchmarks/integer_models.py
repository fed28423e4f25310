"""Whole models in integers: what they lose, whether runtimes agree, and what the reference costs.

Run `python -m benchmarks.integer_models` (`--only resnet50 …`). Each model is quantized by
`pq.IntegerQuantizer`, the CNNs with `int_only=True`. It writes `results/integer_models.json`.
"""

import argparse
import time
import warnings
from collections.abc import Callable
from functools import partial

import torch
from rich.console import Console
from torch.fx import GraphModule

import pt2e_quant as pq
from benchmarks import models
from benchmarks.cases import CASES, Case, image_case, llama_case
from benchmarks.results import write_results
from pt2e_quant.graph.subgraphs import copy_graph

console = Console(width=120)
MODELS: dict[str, Callable[..., Case]] = {
    **{name: CASES[name] for name in ("resnet18", "resnet50", "mobilenet_v2")},
    "efficientnet_b0": partial(image_case, "efficientnet_b0", models.efficientnet_b0),
    **{name: CASES[name] for name in ("vit_small", "minilm")},
    "llama": llama_case,
}
RUNTIMES = {"xnnpack": "xnnpack", "onnx": "onnxruntime_x86"}
GOALS = {"lost_db": 1.0, "ratio": 3.0, "share_equal": 0.999}
"""Most dB lost against the q/dq graph; most time over float's; least share of equal values."""
REPEATS = 7


def quantized_of(case: Case) -> GraphModule:
    """Return the model in q/dq, every operator quantized that has an integer form."""
    program = torch.export.export(case.model, case.example)
    is_only = not case.is_transformer
    prepared = pq.prepare_pt2e(program, pq.IntegerQuantizer(), int_only=is_only)
    return pq.convert_pt2e(pq.calibrate(prepared, case.calibration, progress=False))


def cpu_seconds(works: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the least CPU seconds of each, taken in turn: other processes can only add to them."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for number in range(REPEATS + 1):
        for name, work in works.items():
            start = time.process_time()
            work()
            if number:
                found[name].append(time.process_time() - start)
    return {name: min(values) for name, values in found.items()}


def agreement(case: Case, gm: GraphModule, batches: int) -> dict[str, object]:
    """Return how much of the last quantized tensor the runtimes and the reference share.

    Every operator that a runtime has integers for runs in integers, also where float is faster.
    """
    rows: dict[str, object] = {}
    for backend, profile in RUNTIMES.items():
        artifact = pq.backends.get(backend).lower(gm, verify=False, strict=False, allow_slower=True)
        found = pq.verify_parity(
            artifact, case.held_out[:batches], quantized=gm, profile=profile, most_nodes=1
        )
        floats = sorted({operator.operator for operator in pq.audit(artifact).islands})
        rows[backend] = {
            "share_equal": round(found.share_equal, 6),
            "steps": found.most_steps,
            "float": floats,
        }
    return rows


def measure(case: Case, batches: int) -> dict[str, object]:
    """Return one model's row."""
    gm = quantized_of(case)
    audited = pq.audit(gm)
    reference = pq.integer_reference(copy_graph(gm))
    with torch.no_grad():
        batch = case.held_out[:batches]
        outputs = [
            torch.cat([module(*inputs).flatten() for inputs in batch])
            for module in (case.model, gm, reference)
        ]
        seconds = cpu_seconds(
            {
                "float": partial(case.model, *case.example),
                "qdq": partial(gm, *case.example),
                "integer": partial(reference, *case.example),
            }
        )
    real, simulated, exact = outputs
    qdq_db, integer_db = pq.sqnr_db(real, simulated), pq.sqnr_db(real, exact)
    return {
        "model": case.name,
        "integer_operators": audited.integer_operators,
        "float_operators": sorted({operator.operator for operator in audited.islands}),
        "qdq_db": round(qdq_db, 2),
        "integer_db": round(integer_db, 2),
        "lost_db": round(qdq_db - integer_db, 2),
        "milliseconds": {name: round(1e3 * value, 2) for name, value in seconds.items()},
        "ratio": round(seconds["integer"] / seconds["float"], 2),
        **({} if case.is_transformer else {"parity": agreement(case, gm, batches)}),
    }


def main() -> None:
    """Measure the chosen models, print and record their rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[*MODELS])
    parser.add_argument("--image", type=int, default=224)
    parser.add_argument("--batches", type=int, default=8)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in options.only:
        row = measure(MODELS[name](image=options.image), options.batches)
        console.print(row)
        write_results("integer_models", [row], ("model",))


if __name__ == "__main__":
    main()
