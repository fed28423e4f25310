"""How long do prepare and convert take, how do they grow, and what does lowering to `.pte` cost?

Run `python -m benchmarks.compile_time`. Both sides start from the same exported program's
`.module()` and observe with min-max; our whole recipe `int8` is shown beside them. Lowering is
timed as a user calls it, in CPU seconds: ours includes its check run.
"""

import argparse
import gc
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
    XNNPACKQuantizer,
    get_symmetric_quantization_config,
)
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torchao.quantization.pt2e import quantize_pt2e as torchao

import pt2e_quant as pq
from benchmarks import models, peers, stacks
from benchmarks.peers_low_bit import lower_to_pte
from benchmarks.results import write_results
from pt2e_quant.flow.annotate.observer_choice import ObserverChoice

console = Console(width=120)
Inputs = tuple[Tensor, ...]
Stages = dict[str, float]
# (peer / ours) that the project holds itself to: a tenth at tiny widths, a fifth on real ones
GOALS = {"conv stack 80": 10.0, "attention stack 80": 10.0, "resnet50": 5.0, "bert": 5.0}


def bert_base() -> tuple[nn.Module, Inputs]:
    """Return BERT base at 64 tokens, ids and mask of one row."""
    from benchmarks.text_models import bert, token_batches

    return bert(), token_batches(1, tokens=64, vocabulary=30_000, seed=0)[0]


CASES: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {
    "conv stack 80": lambda: (stacks.conv_stack(80), stacks.conv_stack_input()),
    "attention stack 80": lambda: (stacks.attention_stack(80), stacks.attention_stack_input()),
    "resnet50": lambda: (models.resnet50(image=64), (torch.zeros(1, 3, 64, 64),)),
    "bert": bert_base,
}


def time_ours(
    ep: ExportedProgram, inputs: Inputs, *, min_max: bool = True
) -> tuple[Stages, GraphModule]:
    """Return seconds of prepare and convert, and the converted graph.

    Args:
        ep: The float program.
        inputs: One calibration batch.
        min_max: Do the peer's job, min-max and nothing else; False is the whole recipe `int8`,
            with its range searches and outlier scales.
    """
    quantizer = pq.backends.get("xnnpack").quantizer("int8_minmax")
    if min_max:
        quantizer.observers, quantizer.algorithms = ObserverChoice(), ()
    return time_flow(ep, inputs, lambda gm: pq.prepare_pt2e(gm, quantizer), pq.convert_pt2e)


def time_torchao(ep: ExportedProgram, inputs: Inputs) -> tuple[Stages, GraphModule]:
    """Return the same of torchao's PT2E with XNNPACKQuantizer."""
    quantizer = peers.xnnpack_quantizer(min_max=True)
    prepare = partial(torchao.prepare_pt2e, quantizer=quantizer)
    return time_flow(ep, inputs, prepare, torchao.convert_pt2e)


def time_flow(
    ep: ExportedProgram,
    inputs: Inputs,
    prepare: Callable[[GraphModule], GraphModule],
    convert: Callable[[GraphModule], GraphModule],
) -> tuple[Stages, GraphModule]:
    """Time prepare and convert around one calibration call, which is not counted."""
    gm = ep.module()
    gc.collect()
    start = time.perf_counter()
    prepared = prepare(gm)
    prepared_at = time.perf_counter()
    with torch.no_grad():
        prepared(*inputs)
    calibrated_at = time.perf_counter()
    converted = convert(prepared)
    stages = {
        "prepare": prepared_at - start,
        "convert": time.perf_counter() - calibrated_at,
        "nodes": float(sum(node.op == "call_function" for node in ep.graph.nodes)),
    }
    return stages, converted


def median_stages(runs: list[Stages]) -> Stages:
    """Return the median of each stage and of their sum."""
    stages = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    stages["total"] = statistics.median(run["prepare"] + run["convert"] for run in runs)
    return stages


def compare(name: str, repeats: int) -> dict[str, object]:
    """Return one row: our stages and torchao's on one model, run in turn."""
    model, inputs = CASES[name]()
    ep = torch.export.export(model, inputs)
    ours: list[Stages] = []
    recipe: list[Stages] = []
    theirs: list[Stages] = []
    for _ in range(repeats):
        ours.append(time_ours(ep, inputs)[0])
        theirs.append(time_torchao(ep, inputs)[0])
        recipe.append(time_ours(ep, inputs, min_max=False)[0])
    mine, other = median_stages(ours), median_stages(theirs)
    return {
        "question": "prepare + convert",
        "model": name,
        "ours_s": mine | {"recipe int8": median_stages(recipe)["total"]},
        "torchao_s": other,
        "ratio": round(other["total"] / mine["total"], 2),
        "goal": GOALS[name],
    }


def linearity(kind: str, depths: tuple[int, int], repeats: int) -> dict[str, object]:
    """Return our time per node at two depths of one stack."""
    build, example = {
        "conv": (stacks.conv_stack, stacks.conv_stack_input),
        "attention": (stacks.attention_stack, stacks.attention_stack_input),
    }[kind]
    inputs = example()
    programs = {depth: torch.export.export(build(depth), inputs) for depth in depths}
    runs: dict[int, list[Stages]] = {depth: [] for depth in depths}
    for _ in range(repeats):
        for depth, ep in programs.items():
            # the small graph is over at once: time several, to see past the noise
            count = max(depths) // depth if depth < max(depths) else 1
            runs[depth] += [time_ours(ep, inputs)[0] for _ in range(min(count, 4))]
    per_node = {
        depth: 1e6 * median_stages(found)["total"] / found[0]["nodes"]
        for depth, found in runs.items()
    }
    shallow, deep = (per_node[depth] for depth in depths)
    return {
        "question": "linearity",
        "model": f"{kind} stack",
        "us_per_node": {str(depth): round(value, 1) for depth, value in per_node.items()},
        "ratio": round(deep / shallow, 2),
        "goal": 1.3,
    }


@dataclass(frozen=True, slots=True)
class Lowered:
    """A program to lower.

    Args:
        ep: The float program.
        inputs: One batch.
        again: Exports what PT2E made of it.
        is_dynamic: Quantize activations at run time, as language models are.
    """

    ep: ExportedProgram
    inputs: Inputs
    again: Callable[[GraphModule], ExportedProgram]
    is_dynamic: bool = False


def image_program(build: Callable[..., nn.Module]) -> Lowered:
    """Export an image model for one image of 64 x 64."""
    inputs = (torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0)),)
    ep = torch.export.export(build(image=64), inputs)
    return Lowered(ep, inputs, lambda gm: torch.export.export(gm, inputs))


def llama_program() -> Lowered:
    """Export a random Llama (4 layers of 256) with its cache and up to 64 tokens a call."""
    from benchmarks.llm_ours import export_with_state, exporter, prompt_of_zeros
    from benchmarks.text_models import llama

    ep = export_with_state(llama(layers=4, width=256).model)
    again = exporter(with_state=True).quantized
    return Lowered(ep, prompt_of_zeros(), again, is_dynamic=True)


# what to lower, and the least (peer / ours) in CPU time
LOWERED: dict[str, tuple[Callable[[], Lowered], float]] = {
    "resnet18": (partial(image_program, models.resnet18), 1.0),
    "mobilenet_v2": (partial(image_program, models.mobilenet_v2), 2.0),
    "vit_small": (partial(image_program, models.vit_small), 2.0),
    "llama": (llama_program, 2.0),
}


def lowering(name: str) -> dict[str, object]:
    """Return CPU seconds of our `.pte` lowering and of ExecuTorch's recipe on torchao's graph."""
    make, goal = LOWERED[name]
    case = make()
    ep, inputs = case.ep, case.inputs
    backend = pq.backends.get("xnnpack")
    if case.is_dynamic:
        mine = pq.convert_pt2e(pq.prepare_pt2e(ep, backend.quantizer("int8_dynamic")))
        quantizer = XNNPACKQuantizer().set_global(
            get_symmetric_quantization_config(is_per_channel=True, is_dynamic=True)
        )
        prepare = partial(torchao.prepare_pt2e, quantizer=quantizer)
        _, theirs = time_flow(ep, inputs, prepare, torchao.convert_pt2e)
    else:
        _, mine = time_ours(ep, inputs)
        _, theirs = time_torchao(ep, inputs)
    start = time.process_time()
    lower_to_pte(case.again(theirs), is_dynamic=case.is_dynamic)
    middle = time.process_time()
    backend.lower(mine, inputs)
    end = time.process_time()
    return {
        "question": "lowering to .pte",
        "model": name,
        "ours_s": {"lower": round(end - middle, 2)},
        "peer_s": {"re-export and lower": round(middle - start, 2)},
        "ratio": round((middle - start) / (end - middle), 2),
        "goal": goal,
    }


def show(rows: list[dict[str, object]]) -> None:
    """Print every row."""
    table = Table("question", "model", title="compile time: seconds, or us per node")
    for heading in ("ours", "peer", "peer / ours", "goal"):
        table.add_column(heading, justify="right")
    for row in rows:
        goal = f"<= {row['goal']}" if row["question"] == "linearity" else f">= {row['goal']}"
        ours = row.get("ours_s") or row.get("us_per_node")
        other = row.get("torchao_s") or row.get("peer_s") or {}
        cells = [brief(stages) for stages in (ours, other)]  # type: ignore[arg-type]
        table.add_row(str(row["question"]), str(row["model"]), *cells, str(row["ratio"]), goal)
    console.print(table)


def brief(stages: Stages) -> str:
    """Return stages as text, node counts left out."""
    return "\n".join(f"{name} {value:.2f}" for name, value in stages.items() if name != "nodes")


def main() -> None:
    """Answer the questions asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    questions = ("flow", "linearity", "lowering")
    parser.add_argument("--questions", nargs="+", choices=questions, default=list(questions))
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warm = torch.export.export(nn.Linear(4, 4).eval(), (torch.zeros(1, 4),))
    lower_to_pte(warm, is_dynamic=False)
    tasks: list[Callable[[], dict[str, object]]] = []
    if "flow" in options.questions:
        tasks += [partial(compare, name, options.repeats) for name in options.models]
    if "linearity" in options.questions:
        kinds = ("conv", "attention")
        tasks += [partial(linearity, kind, (20, 320), options.repeats) for kind in kinds]
    if "lowering" in options.questions:
        tasks += [partial(lowering, name) for name in LOWERED]
    rows = []
    for task in tasks:
        rows.append(task())
        write_results("compile_time", rows[-1:], ("question", "model"))
        console.print(rows[-1])
    show(rows)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")  # the peers' own
    main()
