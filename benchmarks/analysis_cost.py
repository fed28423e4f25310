"""What do `compare` and `sensitivity` cost, measured in forwards of the models they look at?

Run `python -m benchmarks.analysis_cost`. Times are of the process's own CPU, one thread: the
least of several calls, in turn.
"""

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.fx.node import map_arg

import pt2e_quant as pq
from benchmarks.inputs import image_batches
from benchmarks.models import mobilenet_v2, resnet18, resnet50, vit_small
from benchmarks.results import write_results
from pt2e_quant.accelerate import bfloat16_products
from pt2e_quant.accelerate.patch import VARIABLE
from pt2e_quant.core.qdq import is_dequantize, is_qdq
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.subgraphs import copy_graph

COMPARE_GOAL = 3.0
"""At most so many times the two forwards does a batch of `compare` take."""

SENSITIVITY_GOAL = 5.0
"""So many times faster than a whole run for each group is exact `sensitivity`."""

SAMPLED = 6
"""So many groups are run alone."""

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

    The whole run is of a graph in which one group alone is quantized, the mean over some groups.
    Those of the float program and of the q/dq graph are given too, and what it takes to make such
    a graph by hand and run it: prepare, calibrate on a batch, convert, with every other group left
    float.
    """
    module: Any = case.program.module()
    first = case.batches[0]
    names = [
        g.group for g in pq.sensitivity(case.program, case.gm, method="weight", progress=False)
    ]
    groups = len(names)
    by_hand = sum(
        least_seconds({"": lambda at=at: quantize_alone(case, names, at)(*first)}, 1)[""]
        for at in range(0, groups, -(-groups // SAMPLED))
    ) / len(range(0, groups, -(-groups // SAMPLED)))
    alone = [one_group(case.gm, at / SAMPLED) for at in range(SAMPLED)]

    def forward(model: Callable[..., Any]) -> None:
        with torch.no_grad():
            model(*first)

    times = least_seconds(
        {
            "float": lambda: forward(module),
            "quantized": lambda: forward(case.gm),
            **{f"alone {at}": lambda gm=gm: forward(gm) for at, gm in enumerate(alone)},
            "one": lambda: pq.sensitivity(case.program, case.gm, [first], progress=False),
            "two": lambda: pq.sensitivity(case.program, case.gm, [first] * 2, progress=False),
        },
        rounds,
    )
    batch = times["two"] - times["one"]
    whole = sum(times[f"alone {at}"] for at in range(SAMPLED)) / SAMPLED
    return {
        "what": "sensitivity",
        "model": case.name,
        "groups": groups,
        "batch_s": round(batch, 3),
        "first_batch_s": round(times["one"], 3),
        "float_forward_s": round(times["float"], 3),
        "quantized_forward_s": round(times["quantized"], 3),
        "one_group_forward_s": round(whole, 3),
        "by_hand_s": round(by_hand, 3),
        "to_by_hand": round(groups * by_hand / batch, 2),
        "to_one_group_forwards": round(groups * whole / batch, 2),
        "to_float_forwards": round(groups * times["float"] / batch, 2),
        "to_quantized_forwards": round(groups * times["quantized"] / batch, 2),
    }


def differences_cost(case: Case, rounds: int) -> dict[str, object]:
    """Return by how much costs move because differences are followed in bfloat16."""

    def costs() -> list[float]:
        found = pq.sensitivity(case.program, case.gm, case.batches[:1], progress=False)
        return [row.cost for row in found]

    followed = costs()
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = bfloat16_products.PATCH.name
    exact = costs()
    os.environ[VARIABLE] = before or ""
    moved = [abs(a / b - 1) for a, b in zip(followed, exact, strict=True) if b]
    return {
        "what": "differences",
        "model": case.name,
        "moved_mean": round(sum(moved) / len(moved), 5),
        "moved_most": round(max(moved), 5),
    }


def quantize_alone(case: Case, names: Sequence[str], at: int) -> GraphModule:
    """Return the program with one operator quantized, as a user makes it.

    Args:
        case: the model.
        names: of all operators that are quantized.
        at: which of them stays so.
    """
    quantizer = pq.backends.get("xnnpack").quantizer("int8")
    for name in (*names[:at], *names[at + 1 :]):
        quantizer.set_node(name, None)
    prepared = pq.prepare(case.program, quantizer)
    return pq.convert(pq.calibrate(prepared, case.batches[:1], progress=False))


def one_group(gm: GraphModule, place: float) -> GraphModule:
    """Return a graph in which one operator alone reads quantized tensors, and the others float.

    Args:
        gm: the q/dq graph.
        place: of the operator among those that are quantized, from 0 to 1.
    """
    made = copy_graph(gm)
    readers = [n for n in made.graph.nodes if any(map(is_dequantize, n.all_input_nodes))]
    computing = [n for n in readers if not is_qdq(n)]
    kept = {*computing[int(place * len(computing))].all_input_nodes}
    for number, node in enumerate([n for n in made.graph.nodes if is_dequantize(n)]):
        if node in kept:
            continue
        source = node.args[0]
        if source.op == "get_attr":  # a weight: in float, what the dequantize gives
            name = f"float_{number}"
            args = map_arg(node.args, lambda n: constant_of(made, n))
            made.register_buffer(name, node.target(*args, **node.kwargs))
            with made.graph.inserting_before(node):
                node.replace_all_uses_with(made.graph.get_attr(name))
        else:
            node.replace_all_uses_with(source.args[0])
    made.graph.eliminate_dead_code()
    made.recompile()
    return made


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
        for measure in (differences_cost, compare_cost, sensitivity_cost):
            rows.append(measure(case, arguments.rounds))
            Console(width=140).print(rows[-1])
    write_results("analysis_cost", rows, keys=("what", "model"))


if __name__ == "__main__":
    main()
