"""How much memory do prepare and convert take beyond the float model?

Run `python -m benchmarks.memory`. Each row is a process of its own (Linux): the model is exported,
only the graph module is kept, and the kernel's high-water mark is reset before each step.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.fx import GraphModule

from benchmarks.results import write_results

console = Console(width=120)
Inputs = tuple[Tensor, ...]
MIB = 1 << 20
# (peak - float model in use) / float model, beyond the integers: what the project holds itself to
GOAL = 0.10


def resnet50() -> tuple[nn.Module, Inputs]:
    """Return a ResNet-50 and one small image."""
    from benchmarks import models

    return models.resnet50(image=64), (torch.zeros(1, 3, 64, 64),)


def bert_base() -> tuple[nn.Module, Inputs]:
    """Return BERT base at 32 tokens, ids and mask of one row."""
    from benchmarks.text_models import bert, token_batches

    return bert(), token_batches(1, tokens=32, vocabulary=30_000, seed=0)[0]


CASES: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {
    "resnet50": resnet50,
    "bert": bert_base,
}


def in_use(field: str) -> int:
    """Return a line of this process's status in bytes: VmRSS is now, VmHWM the most so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def peak_of(step: Callable[[], GraphModule]) -> tuple[GraphModule, int, int, int]:
    """Run a step; returns its result and the bytes before, at the peak, and after."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = in_use("VmRSS")
    result = step()
    peak = in_use("VmHWM")
    gc.collect()
    return result, before, peak, in_use("VmRSS")


def tensor_bytes(gm: GraphModule, *, floats: bool) -> int:
    """Return the bytes of a module's float tensors, or of all others."""
    held = {t.untyped_storage().data_ptr(): t for t in gm.state_dict().values()}
    return sum(t.nbytes for t in held.values() if t.is_floating_point() is floats)


def quantize_there(name: str, side: str) -> dict[str, object]:
    """Return one row, measured in this process."""
    from benchmarks import peers
    from pt2e_quant.pt2e import quantize_pt2e as ours

    flow = ours
    if side == "torchao":
        from torchao.quantization.pt2e import quantize_pt2e as flow  # type: ignore[no-redef]
    quantizer = peers.xnnpack_quantizer(min_max=True)
    model, inputs = CASES[name]()
    # The first call of everything costs memory once: take it before anything is measured.
    tiny = torch.export.export(nn.Linear(4, 4), (torch.zeros(1, 4),)).module()
    warm = flow.prepare_pt2e(tiny, peers.xnnpack_quantizer(min_max=True))
    warm(torch.zeros(1, 4))
    flow.convert_pt2e(warm)
    gm = torch.export.export(model, inputs).module()
    del model
    floats = tensor_bytes(gm, floats=True)
    gm, start, prepare_peak, prepared_end = peak_of(lambda: flow.prepare_pt2e(gm, quantizer))
    with torch.no_grad():
        gm(*inputs)
    gm, convert_start, convert_peak, end = peak_of(lambda: flow.convert_pt2e(gm))
    return {
        "model": name,
        "side": side,
        "float_bytes": floats,
        "integer_bytes": tensor_bytes(gm, floats=False),
        "prepare_peak_bytes": prepare_peak - start,
        "prepare_kept_bytes": prepared_end - start,
        "convert_peak_bytes": convert_peak - convert_start,
        "convert_kept_bytes": end - convert_start,
    }


def measure(name: str, side: str) -> dict[str, object]:
    """Return one row, measured in a process of its own."""
    # Large blocks go back to the system when they are freed, so that the mark means what it says.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.memory", "--here", name, side]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} {side} failed:\n{done.stderr[-2000:]}")
    row: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return row


def show(rows: list[dict[str, object]]) -> None:
    """Print the rows; the last column is what counts against the goal."""
    table = Table("model", "side", "float", "integers", "prepare peak", "convert peak", "over")
    for row in rows:
        sizes = {k: float(v) / MIB for k, v in row.items() if k.endswith("bytes")}  # type: ignore[arg-type]
        most = max(sizes["prepare_peak_bytes"], sizes["convert_peak_bytes"])
        over = (most - sizes["integer_bytes"]) / sizes["float_bytes"]
        named = ("float_bytes", "integer_bytes", "prepare_peak_bytes", "convert_peak_bytes")
        cells = [f"{sizes[name]:.1f} MiB" for name in named]
        table.add_row(str(row["model"]), str(row["side"]), *cells, f"{over:+.0%}")
    console.print(table)
    console.print(f"goal: at most {GOAL:+.0%} of the float model beyond the integers")


def main() -> None:
    """Measure every case on both sides, print the table and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--here", nargs=2, metavar=("MODEL", "SIDE"), help=argparse.SUPPRESS)
    parser.add_argument("--no-save", action="store_true", help="print only")
    options = parser.parse_args()
    if options.here:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            print(json.dumps(quantize_there(*options.here)))
        return
    rows = [measure(name, side) for name in options.models for side in ("ours", "torchao")]
    show(rows)
    if not options.no_save:
        write_results("memory", rows, ("model", "side"))


if __name__ == "__main__":
    main()
