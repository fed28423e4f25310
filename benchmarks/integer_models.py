"""Whole models in integers: what they lose, whether runtimes agree, and what the reference costs.

Run `python -m benchmarks.integer_models` (`--only resnet50 …`). Each model is quantized by
`pq.IntegerQuantizer`, the CNNs with `int_only=True`. It writes `results/integer_models.json`.
"""

import argparse
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch.fx import GraphModule

import pt2e_quant as pq
from benchmarks import models
from benchmarks.cases import CASES, Case, image_case, llama_case
from benchmarks.results import write_results

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


def quantized_of(case: Case, quantizer: Any = None) -> GraphModule:
    """Return the model in q/dq, by default every operator quantized that has an integer form."""
    program = torch.export.export(case.model, case.example)
    if quantizer is None:
        is_only = not case.is_transformer
        prepared = pq.prepare_pt2e(program, pq.IntegerQuantizer(), int_only=is_only)
    else:
        prepared = pq.prepare_pt2e(program, quantizer)
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


def agreement(
    case: Case, gm: GraphModule, backend: str, batches: int, *, allow_slower: bool
) -> dict[str, object]:
    """Return how much of the last quantized tensor a runtime and the reference share.

    With `allow_slower` every operator that the runtime has integers for runs in integers, also
    where float is faster. What an artifact computes in float is float in the reference;
    `integers` is what is left if the reference goes on from the artifact's integers behind it, and
    `of_floats` the operators in float whose results differ.
    """
    artifact = pq.backends.get(backend).lower(
        gm, verify=False, strict=False, allow_slower=allow_slower
    )
    given = case.held_out[:batches]
    found = pq.verify_parity(artifact, given, quantized=gm, profile=RUNTIMES[backend], most_nodes=1)
    row: dict[str, object] = {
        "share_equal": round(found.share_equal, 6),
        "steps": found.most_steps,
        "float": len(found.floats),
        "slower": len(found.slower),
    }
    if found.integers:
        integers = found.integers[-1]
        row["integers"] = {"share_equal": integers.share_equal, "steps": integers.most_steps}
        row["of_floats"] = {
            operator.node: {
                "operator": operator.operator,
                "share_differing": float(f"{1 - operator.share_equal:.3g}"),
                "steps": operator.most_steps,
            }
            for operator in found.of_floats
            if operator.most_steps
        }
    return row


def measure_default(case: Case, batches: int, image: int) -> dict[str, object]:
    """Return one model's row of the artifacts of each backend's own quantizer and defaults."""
    parity = {}
    for backend in RUNTIMES:
        gm = quantized_of(case, pq.backends.get(backend).quantizer("int8"))
        parity[backend] = agreement(case, gm, backend, batches, allow_slower=False)
    return {"model": f"{case.name}, {image} pixels", "default": parity}


def measure(case: Case, batches: int) -> dict[str, object]:
    """Return one model's row."""
    gm = quantized_of(case)
    audited = pq.audit(gm)
    reference = pq.integer_reference(gm)
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
    parity = {}
    for backend in () if case.is_transformer else RUNTIMES:
        parity[backend] = agreement(case, gm, backend, batches, allow_slower=True)
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
        **({} if case.is_transformer else {"parity": parity}),
    }


def main() -> None:
    """Measure the chosen models, print and record their rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[*MODELS])
    parser.add_argument("--image", type=int, default=224)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--default", action="store_true", help="artifacts without options alone")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in options.only:
        case = MODELS[name](image=options.image)
        if options.default:
            row = measure_default(case, options.batches, options.image)
        else:
            row = measure(case, options.batches)
        console.print(row)
        write_results("integer_models", [row], ("model",))


if __name__ == "__main__":
    main()
