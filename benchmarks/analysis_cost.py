"""What do `compare` and `sensitivity` cost, measured in forwards of the models they look at?

Run `python -m benchmarks.analysis_cost`. Times are of the process's own CPU, one thread: the
least of several calls, in turn.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch.export import ExportedProgram
from torch.fx import GraphModule

import pt2e_quant as pq
from benchmarks.inputs import image_batches
from benchmarks.models import mobilenet_v2, resnet18, resnet50, vit_small
from benchmarks.results import write_results

COMPARE_GOAL = 3.0
"""At most so many times the two forwards does a batch of `compare` take."""

SENSITIVITY_GOAL = 5.0
"""So many times faster than a whole run for each group is exact `sensitivity`."""

MODELS = {
    "resnet18": resnet18,
    "resnet50": resnet50,
    "mobilenet_v2": mobilenet_v2,
    "vit_small": vit_small,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A float program, its q/dq graph, and data."""

    name: str
    program: ExportedProgram
    gm: GraphModule
    batches: Sequence[Any]


def quantized(name: str, image: int, batch: int) -> Case:
    """Return a model quantized to static int8."""
    batches = [
        (torch.cat([images for (images,) in image_batches(batch, image, seed)]),)
        for seed in range(3)
    ]
    program = torch.export.export(MODELS[name](image), batches[0])
    prepared = pq.prepare(program, pq.backends.get("xnnpack").quantizer("int8"))
    gm = pq.convert(pq.calibrate(prepared, batches[:1], progress=False))
    return Case(name=f"{name}, {batch}x3x{image}x{image}", program=program, gm=gm, batches=batches)


def least_seconds(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the least CPU seconds of each call, called in turn."""
    found = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for label, call in calls.items():
            begin = time.process_time()
            call()
            found[label] = min(found[label], time.process_time() - begin)
    return found


def compare_cost(case: Case, rounds: int) -> dict[str, object]:
    """Return what one more batch costs `compare`, and what the two forwards of it do."""
    module: Any = case.program.module()
    first, *more = case.batches

    def forwards() -> None:
        with torch.no_grad():
            module(*first)
            case.gm(*first)

    times = least_seconds(
        {
            "forwards": forwards,
            "one": lambda: pq.compare(case.program, case.gm, [first], progress=False),
            "all": lambda: pq.compare(case.program, case.gm, [first, *more], progress=False),
        },
        rounds,
    )
    batch = (times["all"] - times["one"]) / len(more)
    return {
        "what": "compare",
        "model": case.name,
        "forwards_s": round(times["forwards"], 3),
        "batch_s": round(batch, 3),
        "first_batch_s": round(times["one"], 3),
        "ratio": round(batch / times["forwards"], 2),
    }


def sensitivity_cost(case: Case, rounds: int) -> dict[str, object]:
    """Return what exact `sensitivity` costs a batch, and what a whole run for each group does.

    A whole run with one group quantized takes longer than one in float, and less long than one
    of the q/dq graph: both ratios are given.
    """
    module: Any = case.program.module()
    first = case.batches[0]
    groups = len(pq.sensitivity(case.program, case.gm, method="weight", progress=False))

    def forward(model: Callable[..., Any]) -> None:
        with torch.no_grad():
            model(*first)

    times = least_seconds(
        {
            "float": lambda: forward(module),
            "quantized": lambda: forward(case.gm),
            "one": lambda: pq.sensitivity(case.program, case.gm, [first], progress=False),
            "two": lambda: pq.sensitivity(case.program, case.gm, [first] * 2, progress=False),
        },
        rounds,
    )
    batch = times["two"] - times["one"]
    return {
        "what": "sensitivity",
        "model": case.name,
        "groups": groups,
        "batch_s": round(batch, 3),
        "first_batch_s": round(times["one"], 3),
        "float_forward_s": round(times["float"], 3),
        "quantized_forward_s": round(times["quantized"], 3),
        "to_float_forwards": round(groups * times["float"] / batch, 2),
        "to_quantized_forwards": round(groups * times["quantized"] / batch, 2),
    }


def main() -> None:
    """Measure and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["resnet50", "mobilenet_v2", "vit_small"])
    parser.add_argument("--image", type=int, default=224)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in arguments.models:
        case = quantized(name, arguments.image, arguments.batch)
        for measure in (compare_cost, sensitivity_cost):
            rows.append(measure(case, arguments.rounds))
            Console(width=140).print(rows[-1])
    write_results("analysis_cost", rows, keys=("what", "model"))


if __name__ == "__main__":
    main()
