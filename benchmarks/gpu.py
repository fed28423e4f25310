"""Are the CUDA kernels right, how fast are they, and which tiles suit this GPU?

`python -m benchmarks.gpu` on a machine with an NVIDIA GPU: checks every kernel against its
reference on random shapes, under compute-sanitizer too where that is installed; sweeps tiles and
writes `kernels/<op>/tiles/<device>.json`; times every case beside its peers in CUDA graphs and
writes `kernels/<op>/measured/<device>.json`; times whole models; and keeps every figure in
`benchmarks/results/gpu_<device>.json`. Exits with 1 where a kernel is wrong (it is then neither
tuned nor timed), with 2 where there is no GPU.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console

from benchmarks.gpu_check import Check, check_kernel, run_sanitizer
from benchmarks.gpu_kernels import Gpu, float_ratios, measure_case
from benchmarks.gpu_models import MODELS, measure_model
from benchmarks.gpu_record import gpu_conditions, write_gpu_results
from benchmarks.gpu_timer import GraphTimer
from benchmarks.gpu_tune import sweep_kernel, write_measured, write_tiles
from benchmarks.kernels.bench_case import Bench
from benchmarks.kernels.catalog import BENCHES
from benchmarks.kernels.device_limits import limits_of
from pt2e_quant.kernels.measured import measured_class, read_ratios
from pt2e_quant.kernels.tiles import device_slug, read_tiles

console = Console(width=130)
Row = dict[str, object]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; see the module."""
    options = _options(arguments)
    if not torch.cuda.is_available():
        print(
            f"benchmarks.gpu needs an NVIDIA GPU, and torch {torch.__version__} sees none",
            file=sys.stderr,
        )
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    gpu = _gpu(device, options.rounds)
    capability = 10 * torch.cuda.get_device_capability(device)[0]
    capability += torch.cuda.get_device_capability(device)[1]
    benches = [
        bench
        for bench in BENCHES
        if bench.op in (options.ops or [bench.op]) and bench.lowest_capability <= capability
    ]
    checks = check(gpu, benches, range(options.seeds))
    if options.only_check:
        return 1 if any(c.failures for c in checks) else 0
    wrong = {c.op for c in checks if c.failures}
    parts: dict[str, list[Row]] = {"checks": [c.to_json() for c in checks]}
    if not options.no_sanitizer:
        parts["sanitizer"] = [
            {"op": "all", "found": run_sanitizer(list(dict.fromkeys(b.op for b in benches)))}
        ]
        console.print("compute-sanitizer:", parts["sanitizer"][0]["found"])
    right = [bench for bench in benches if bench.name not in wrong]
    if not options.no_sweep:
        parts["sweeps"] = tune(gpu, right)
    parts["kernels"] = measure(gpu, right)
    if not options.no_models:
        parts["models"] = measure_models(gpu)
    print(f"wrote {write_gpu_results(gpu.slug, gpu_conditions(device), parts)}")
    return 1 if wrong else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ops", nargs="+", default=[], help="units; all by default")
    parser.add_argument("--seeds", type=int, default=20, help="shapes that a kernel is checked on")
    parser.add_argument("--rounds", type=int, default=50, help="replays of each program")
    parser.add_argument("--only-check", action="store_true", help="write and time nothing")
    parser.add_argument("--no-sanitizer", action="store_true")
    parser.add_argument("--no-sweep", action="store_true", help="keep the tiles there are")
    parser.add_argument("--no-models", action="store_true")
    return parser.parse_args(arguments)


def _gpu(device: torch.device, rounds: int) -> Gpu:
    found = torch.cuda.get_device_properties(device)
    slug = device_slug(found.name)
    return Gpu(
        device=device,
        slug=slug,
        l2_bytes=found.L2_cache_size,
        memory_bytes=found.total_memory,
        limits=limits_of(slug),
        timer=GraphTimer(device),
        rounds=rounds,
    )


def check(gpu: Gpu, benches: Sequence[Bench[Any]], seeds: Sequence[int]) -> list[Check]:
    """Every kernel against its reference."""
    found = []
    for bench in benches:
        found.append(check_kernel(bench, gpu.device, seeds))
        console.print(f"{bench.name}: {len(seeds)} shapes, {len(found[-1].failures)} wrong")
        for failure in found[-1].failures:
            console.print(f"    {failure}", markup=False)
    return found


def tune(gpu: Gpu, benches: Sequence[Bench[Any]]) -> list[Row]:
    """Sweep every shape class that a unit has cases for, and write the tables."""
    rows: list[Row] = []
    for bench in benches:
        measured = dict.fromkeys(case.shape_class for case in bench.cases)
        found = [sweep_kernel(gpu, bench, name) for name in measured if name in bench.sweep]
        for sweep in found:
            rows.append(sweep.to_json())
            console.print(rows[-1])
        if found:
            write_tiles(bench.op, gpu.slug, {sweep.shape_class: sweep.best for sweep in found})
    # Launches read the tables through a cache.
    read_tiles.cache_clear()
    return rows


def measure(gpu: Gpu, benches: Sequence[Bench[Any]]) -> list[Row]:
    """Every case beside its peers; the ratios over float go where lowering reads them."""
    rows: list[Row] = []
    for bench in benches:
        of_bench = []
        for case in bench.cases:
            of_bench.append(measure_case(gpu, bench, case))
            console.print(of_bench[-1])
            torch.cuda.empty_cache()
        if ratios := float_ratios(of_bench):
            named = {measured_class(name, bench.variant): r for name, r in ratios.items()}
            write_measured(bench.op, gpu.slug, named)
        rows += of_bench
    read_ratios.cache_clear()
    return rows


def measure_models(gpu: Gpu) -> list[Row]:
    """Whole models through the backend."""
    rows: list[Row] = []
    for case in MODELS:
        rows += measure_model(case, gpu.device, gpu.timer, rounds=gpu.rounds)
        console.print(rows[-3:])
    return rows


if __name__ == "__main__":
    sys.exit(main())
