"""`python -m benchmarks.gpu` from end to end in the interpreter, with a GPU that is made up.

Kernels, peers, tables and files are the real ones; sizes are small, and the clock is the host's.
"""

import dataclasses
import functools
import json
import time
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import gpu
from benchmarks.gpu_kernels import Gpu
from benchmarks.gpu_models import ModelCase
from benchmarks.gpu_timer import timing_of
from benchmarks.kernels.catalog import BENCHES
from benchmarks.kernels.device_limits import limits_of
from pt2e_quant.kernels import measured, tiles
from tests.fake_cuda import H200
from tests.kernels.small_draws import small_seeds

CPU = torch.device("cpu")
SLUG = "nvidia_h200"
# Those that take a second or two; `slow` has the rest.
QUICK = ("int8_linear", "int8_pool")


@dataclasses.dataclass
class HostProgram:
    """Calls one after the other."""

    calls: int
    run: list

    def replay(self):
        for call in self.run:
            call()


class HostTimer:
    """Runs every program once; the host's clock."""

    def capture(self, calls):
        for call in calls:
            call()
        return HostProgram(len(calls), list(calls))

    def time(self, programs, *, rounds):
        found = {}
        for label, program in programs.items():
            begin = time.perf_counter()
            program.replay()
            found[label] = timing_of([(time.perf_counter() - begin) / program.calls])
        return found


def small(bench):
    """A unit with its first case, of sizes that its check draws, and two tiles to choose from."""
    least = small_seeds(bench)[0]

    def draw(device, seed):
        return bench.draw(device, least)

    # Tiles of a class of rows hold whole rows, and these may be longer than a narrow one.
    of_rows = [case for case in bench.cases if case.shape_class in ("wide", "long")]
    case = dataclasses.replace((of_rows or bench.cases)[0], make=draw)
    sweep = {name: tiles[:2] for name, tiles in bench.sweep.items() if name == case.shape_class}

    def bound(operands):
        exact = bench.bound(operands)
        # The interpreter truncates to bfloat16.
        return dataclasses.replace(exact, rtol=max(exact.rtol, 2**-7), atol=max(exact.atol, 1e-6))

    return dataclasses.replace(bench, draw=draw, cases=(case,), sweep=sweep, bound=bound)


def tiny():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))


@pytest.fixture
def made_up_gpu(monkeypatch, tmp_path):
    """A machine with a GPU, as the script sees it; what it writes goes to a folder of its own."""
    for name in ("is_available", "get_device_capability", "get_device_properties"):
        value = {"is_available": True, "get_device_capability": (9, 0)}.get(name, H200)
        monkeypatch.setattr(torch.cuda, name, lambda *args, value=value: value)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    device = Gpu(
        device=CPU,
        slug=SLUG,
        l2_bytes=1,
        memory_bytes=H200.total_memory,
        limits=limits_of(SLUG),
        timer=HostTimer(),
        rounds=2,
    )
    monkeypatch.setattr(gpu, "_gpu", lambda found, rounds: device)
    for name in ("write_tiles", "write_measured", "write_gpu_results"):
        into = functools.partial(getattr(gpu, name), folder=tmp_path)
        monkeypatch.setattr(gpu, name, into)
    model = ModelCase(name="tiny", make=tiny, batch=2, targets={}, size=8)
    monkeypatch.setattr(gpu, "MODELS", (model,))
    monkeypatch.setattr(gpu, "run_sanitizer", lambda ops: "compute-sanitizer is not installed")
    tiles.read_tiles.cache_clear()
    measured.read_ratios.cache_clear()
    yield tmp_path
    tiles.read_tiles.cache_clear()
    measured.read_ratios.cache_clear()


UNITS = [
    pytest.param(bench, id=bench.name, marks=() if bench.op in QUICK else pytest.mark.slow)
    for bench in BENCHES
]


@pytest.mark.parametrize("bench", UNITS)
def test_gpu_benchmark_when_run_then_checks_tunes_times_and_writes_what_others_read(
    bench, made_up_gpu, monkeypatch
):
    monkeypatch.setattr(gpu, "BENCHES", (small(bench),))
    with torch.compiler.set_stance("force_eager"):
        assert gpu.main(["--seeds", "1", "--no-models"]) == 0
    found = json.loads((made_up_gpu / f"gpu_{SLUG}.json").read_text())
    assert found["conditions"]["device"] == H200.name
    assert found["conditions"]["capability"] == "9.0"
    assert found["checks"] == [{"op": bench.name, "draws": 1, "failures": []}]
    (row,) = found["kernels"]
    assert row["unavailable"].keys() <= {"torch._weight_int4pack_mm", "torch._scaled_mm"}
    assert row["peers"].keys() | row["unavailable"].keys() == bench_peers(bench, row)
    for sweep in found["sweeps"]:
        assert not sweep["wrong"]
        assert not sweep["refused"]

    assert f"{H200.name}: {row['median_us']:g} µs" in page_of(made_up_gpu)

    # What a launch and a lowering would read on that GPU.
    monkeypatch.setattr(tiles, "files", lambda package: made_up_gpu)
    monkeypatch.setattr(measured, "files", lambda package: made_up_gpu)
    tiles.read_tiles.cache_clear()
    for sweep in found["sweeps"]:
        assert tiles.read_tiles(bench.op, SLUG)[sweep["shape_class"]].options() == sweep["best"]
    floats = [peer for peer in row["peers"].values() if peer["is_float"]]
    ratios = [peer["ratio"] for peer in floats or row["peers"].values()]
    made = {row["shape_class"]: min(ratios)}
    assert measured.measured_of(bench.op, SLUG, bench.variant) == made
    assert len(measured.read_measured(bench.op, SLUG)) == 1


def bench_peers(bench, row):
    (case,) = (case for case in bench.cases if case.name == row["case"])
    return set(case.peers)


def page_of(results: Path) -> str:
    """The generated page on kernels."""
    text: str = import_module("docs.kernel_page").kernels_page(results)
    return text


def test_gpu_benchmark_when_models_are_asked_for_then_they_go_through_it(made_up_gpu, monkeypatch):
    monkeypatch.setattr(gpu, "BENCHES", ())
    with torch.compiler.set_stance("force_eager"):
        assert gpu.main(["--no-sanitizer", "--no-sweep"]) == 0
    rows = json.loads((made_up_gpu / f"gpu_{SLUG}.json").read_text())["models"]
    assert [row["program"] for row in rows if "failure" not in row]


def test_gpu_benchmark_when_a_kernel_is_wrong_then_neither_tunes_nor_times_it(
    made_up_gpu, monkeypatch
):
    (bench,) = (bench for bench in BENCHES if bench.name == "quantize")
    wrong = dataclasses.replace(small(bench), call=lambda x, tiles: bench.call(x, tiles) + 1)
    monkeypatch.setattr(gpu, "BENCHES", (wrong,))
    assert gpu.main(["--seeds", "1", "--no-models"]) == 1
    found = json.loads((made_up_gpu / f"gpu_{SLUG}.json").read_text())
    assert found["checks"][0]["failures"]
    assert found["kernels"] == found["sweeps"] == []
    assert list(made_up_gpu.glob("*/*")) == []
