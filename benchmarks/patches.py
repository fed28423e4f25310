"""What does each patch of another package save?

Run `python -m benchmarks.patches`. Each is measured with and without, in turn, in one process:
CPU seconds of prepare, one call and convert, and of lowering, and bytes of a `.pte`.
"""

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.fx import GraphModule

import pt2e_quant as pq
from benchmarks import stacks
from benchmarks.results import write_results
from pt2e_quant.accelerate import (
    composite_operators,
    executorch_passes,
    onnx_decompositions,
    onnx_rules,
    onnx_tables,
    pause_gc,
    recompile,
    share_constants,
    single_decomposition,
)
from pt2e_quant.accelerate.patch import VARIABLE

console = Console(width=120)
BACKEND = pq.backends.get("xnnpack")


class Tied(nn.Module):
    """A language model's table, which its head computes with too."""

    def __init__(self, rows: int = 4000, width: int = 64) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width)
        self.head = nn.Linear(width, rows, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Map int64[T] to float[T, rows]."""
        logits: Tensor = self.head(self.table(ids))
        return logits


def converted(model: nn.Module, inputs: tuple[Tensor, ...], recipe: str) -> GraphModule:
    """Return a model's canonical graph."""
    ep = torch.export.export(model.eval(), inputs)
    prepared = pq.prepare_pt2e(ep, BACKEND.quantizer(recipe))
    with torch.no_grad():
        prepared(*inputs)
    return pq.convert_pt2e(prepared)


def cpu_seconds(work: Callable[[], object]) -> float:
    """Return the CPU time of a call."""
    gc.collect()
    start = time.process_time()
    work()
    return time.process_time() - start


def graph_work() -> Callable[[], float]:
    """Return what measures prepare and convert of a deep graph."""
    ep = torch.export.export(stacks.attention_stack(240).eval(), stacks.attention_stack_input())

    def once() -> float:
        gm = ep.module()

        def work() -> None:
            prepared = pq.prepare_pt2e(gm, BACKEND.quantizer("int8"))
            prepared(*stacks.attention_stack_input())
            pq.convert_pt2e(prepared)

        return cpu_seconds(work)

    return once


def lowering_work(backend: str, depth: int, kind: str = "conv") -> Callable[[], float]:
    """Return what measures lowering a stack of blocks, without the check of the file."""
    made = {
        "conv": (stacks.conv_stack, stacks.conv_stack_input),
        "attention": (stacks.attention_stack, stacks.attention_stack_input),
    }
    stack, inputs = made[kind]
    gm = converted(stack(depth), inputs(), "int8")
    return lambda: cpu_seconds(lambda: pq.backends.get(backend).lower(gm, verify=False))


def file_work() -> Callable[[], float]:
    """Return what measures the bytes of a `.pte` with a tied table."""
    gm = converted(Tied(), (torch.tensor([3, 7]),), "int8_dynamic")
    return lambda: float(BACKEND.lower(gm, verify=False).size_bytes)


_to_pte, _few_to_pte = (partial(lowering_work, "xnnpack", depth) for depth in (40, 4))
_to_onnx, _few_to_onnx = (partial(lowering_work, "onnx", depth) for depth in (40, 4))
_deep_to_onnx, _deeper_to_onnx = (
    partial(lowering_work, "onnx", depth, "attention") for depth in (40, 160)
)

CASES = (
    (pause_gc.PATCH, "prepare, one call, convert, attention stack 240 (CPU s)", graph_work),
    (pause_gc.PATCH, "lower to .pte, conv stack 4 (CPU s)", _few_to_pte),
    (pause_gc.PATCH, "lower to ONNX, conv stack 4 (CPU s)", _few_to_onnx),
    (recompile.PATCH, "prepare, one call, convert, attention stack 240 (CPU s)", graph_work),
    (executorch_passes.PATCH, "lower to .pte, conv stack 40 (CPU s)", _to_pte),
    (composite_operators.PATCH, "lower to .pte, conv stack 4 (CPU s)", _few_to_pte),
    (composite_operators.PATCH, "lower to ONNX, conv stack 4 (CPU s)", _few_to_onnx),
    (single_decomposition.PATCH, "lower to .pte, conv stack 4 (CPU s)", _few_to_pte),
    (single_decomposition.PATCH, "lower to .pte, conv stack 40 (CPU s)", _to_pte),
    (onnx_tables.PATCH, "lower to ONNX, conv stack 4 (CPU s)", _few_to_onnx),
    (onnx_decompositions.PATCH, "lower to ONNX, conv stack 4 (CPU s)", _few_to_onnx),
    (onnx_decompositions.PATCH, "lower to ONNX, conv stack 40 (CPU s)", _to_onnx),
    (onnx_rules.PATCH, "lower to ONNX, conv stack 40 (CPU s)", _to_onnx),
    (onnx_rules.PATCH, "lower to ONNX, attention stack 40 (CPU s)", _deep_to_onnx),
    (onnx_rules.PATCH, "lower to ONNX, attention stack 160 (CPU s)", _deeper_to_onnx),
    (share_constants.PATCH, "bytes of a .pte with a tied table", file_work),
)


def main() -> None:
    """Measure, print, and write `results/patches.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--patches", nargs="*", help="names; all by default")
    given = parser.parse_args()
    repeats, names = given.repeats, given.patches
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    table = Table("patch", "of", "with", "without", "ratio")
    for patch, what, prepare in CASES:
        if names and patch.name not in names:
            continue
        measure = prepare()
        measure()
        runs: dict[str, list[float]] = {"": [], patch.name: []}
        for _ in range(repeats):
            for off, values in runs.items():
                os.environ[VARIABLE] = off
                values.append(measure())
        os.environ.pop(VARIABLE)
        on, off = (statistics.median(values) for values in runs.values())
        ratio = round(off / on, 2)
        rows.append({"patch": patch.name, "of": what, "with": on, "without": off, "ratio": ratio})
        table.add_row(patch.name, what, f"{on:.3f}", f"{off:.3f}", f"{ratio:.2f}")
    console.print(table)
    console.print(write_results("patches", rows, ("patch", "of")))


if __name__ == "__main__":
    main()
