"""The GPU benchmark's logic on a CPU: checks, ratios, sweeps, tables; a clock that is made up."""

import json
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from benchmarks import gpu_models, gpu_tune
from benchmarks.gpu import main
from benchmarks.gpu_check import check_kernel, difference
from benchmarks.gpu_kernels import Gpu, float_ratios, measure_case
from benchmarks.gpu_models import ModelCase, measure_model
from benchmarks.gpu_record import write_gpu_results
from benchmarks.gpu_timer import copies_for, timing_of
from benchmarks.gpu_tune import sweep_kernel, write_measured, write_tiles
from benchmarks.kernels.bench_case import Bench, BenchCase, Bound, MathUnit, Peer
from benchmarks.kernels.device_limits import DeviceLimits
from pt2e_quant.kernels.cost import Cost
from pt2e_quant.kernels.tiles import TileConfig

CPU = torch.device("cpu")
LIMITS = DeviceLimits(name="made up", bytes_per_s=1e9, operations_per_s={MathUnit.INT8: 1e12})
DEFAULT, FAST, SAME, WRONG, REFUSED = (
    TileConfig((("BLOCK_M", size),), num_warps=4, num_stages=3) for size in (64, 128, 32, 16, 8)
)


@dataclass(frozen=True)
class FakeProgram:
    """Calls, with the seconds that one takes."""

    calls: int
    seconds: float

    def replay(self):
        raise AssertionError("a made-up clock runs nothing")


class FakeTimer:
    """Reads the time of a call from `clock`, which a call sets."""

    def __init__(self, clock):
        self.clock = clock

    def capture(self, calls):
        calls[0]()
        return FakeProgram(len(calls), self.clock["seconds"])

    def time(self, programs, *, rounds):
        return {label: timing_of([program.seconds] * rounds) for label, program in programs.items()}


@pytest.fixture
def clock():
    return {"seconds": 1.0}


@pytest.fixture
def gpu(clock):
    return Gpu(
        device=CPU,
        slug="made_up",
        l2_bytes=1000,
        memory_bytes=10**9,
        limits=LIMITS,
        timer=FakeTimer(clock),
        rounds=3,
    )


def doubling(clock, seconds, **changes):
    """A unit whose kernel doubles int8 values; seconds by tiles."""

    def call(x, tiles):
        if tiles == REFUSED:
            raise RuntimeError("out of resource: shared memory")
        clock["seconds"] = seconds[tiles or DEFAULT]
        return 2 * x + (1 if tiles == WRONG else 0)

    def peer(taken, *, is_float):
        def prepare(x):
            return lambda: clock.update(seconds=taken)

        return Peer(prepare=prepare, is_float=is_float)

    def absent(x):
        raise NotImplementedError("no such kernel")

    case = BenchCase(
        name="100",
        shape_class="large",
        make=lambda device, seed: torch.full((100,), seed, dtype=torch.int8, device=device),
        cost=Cost(bytes=10**6, operations=10**6),
        unit=MathUnit.INT8,
        peers={
            "cuBLAS bf16": peer(4e-3, is_float=True),
            "cuBLAS fp16": peer(3e-3, is_float=True),
            "torch._int_mm + epilogue": peer(2.2e-3, is_float=False),
            "torch._scaled_mm": Peer(prepare=absent, is_float=False),
        },
        targets={"cuBLAS bf16": 1.6, "torch._int_mm + epilogue": 1.2},
    )
    values = {
        "op": "doubling",
        "call": call,
        "reference": lambda x: 2 * x,
        "draw": lambda device, seed: torch.arange(seed + 1, dtype=torch.int8, device=device),
        "bound": lambda x: Bound(),
        "cases": (case,),
        "sweep": {"large": (FAST, SAME, WRONG, REFUSED)},
        **changes,
    }
    return Bench(**values)


SECONDS = {DEFAULT: 2e-3, FAST: 1.5e-3, SAME: 1.99e-3, WRONG: 1e-4}


def test_copies_for_when_sizes_vary_then_copies_fill_the_cache_and_fit_the_memory():
    assert copies_for(100, l2_bytes=1000, memory_bytes=10**9) == 30
    assert copies_for(10**6, l2_bytes=1000, memory_bytes=10**9) == 1
    assert copies_for(100, l2_bytes=1000, memory_bytes=500) == 5
    assert copies_for(1, l2_bytes=10**9, memory_bytes=10**9) == 128


def test_timing_of_when_given_samples_then_gives_median_minimum_and_80th_percentile():
    found = timing_of([5.0, 1.0, 2.0, 3.0, 4.0])
    assert (found.median_s, found.min_s, found.p80_s) == (3.0, 1.0, 5.0)


@pytest.mark.parametrize(
    ("made", "wanted", "bound", "said"),
    [
        (torch.tensor([1, 2]), torch.tensor([1, 3]), Bound(lsb=1), None),
        (torch.tensor([1, 2]), torch.tensor([1, 4]), Bound(lsb=1), "2 steps"),
        (torch.tensor([1]).char(), torch.tensor([1]), Bound(), "torch.int8[1], not torch.int64[1]"),
        (torch.ones(2), torch.ones(3), Bound(), "not torch.float32[3]"),
        (torch.tensor([1.01]), torch.tensor([1.0]), Bound(rtol=0.02), None),
        (torch.tensor([1.01, 2.0]), torch.tensor([1.0, 2.0]), Bound(rtol=1e-3), "1 of 2 values"),
        (torch.tensor([float("nan")]), torch.tensor([1.0]), Bound(atol=9.0), "1 of 1 values"),
        (torch.tensor([float("inf")]), torch.tensor([float("inf")]), Bound(), None),
        (torch.zeros(0), torch.zeros(0), Bound(), None),
        ((torch.ones(1), torch.ones(1)), torch.ones(1), Bound(), "2 results, not 1"),
        ((torch.ones(1), torch.zeros(1)), (torch.ones(1), torch.ones(1)), Bound(), "result 1"),
    ],
)
def test_difference_when_results_differ_beyond_the_bound_then_says_how(made, wanted, bound, said):
    found = difference(made, wanted, bound)
    assert (found is None) if said is None else (found is not None and said in found)


def test_check_kernel_when_one_seed_goes_wrong_then_names_it_and_passes_a_right_kernel(clock):
    right = doubling(clock, SECONDS)
    assert check_kernel(right, CPU, range(3)).failures == ()
    wrong = doubling(clock, SECONDS, reference=lambda x: 2 * x + (x == 2))
    (failure,) = check_kernel(wrong, CPU, range(3)).failures
    assert failure.startswith("seed 2, shapes [[3]]")


def test_measure_case_when_peers_are_there_then_times_the_case_beside_them(gpu, clock):
    bench = doubling(clock, SECONDS)
    row = measure_case(gpu, bench, bench.cases[0])
    assert row["copies"] == 30
    assert row["median_us"] == 2000.0
    assert row["limit_us"] == 1000.0
    assert row["share_of_limit"] == 0.5
    assert {name: peer["ratio"] for name, peer in row["peers"].items()} == {
        "cuBLAS bf16": 2.0,
        "cuBLAS fp16": 1.5,
        "torch._int_mm + epilogue": 1.1,
    }
    assert row["peers"]["cuBLAS bf16"]["met"]
    assert not row["peers"]["torch._int_mm + epilogue"]["met"]
    assert "target" not in row["peers"]["cuBLAS fp16"]
    assert row["unavailable"] == {"torch._scaled_mm": "NotImplementedError: no such kernel"}
    # Against the fastest float peer.
    assert float_ratios([row]) == {"large": 1.5}


def test_float_ratios_when_a_class_has_many_cases_then_the_slowest_decides():
    def row(shape_class, **ratios):
        peers = {name: {"ratio": r, "is_float": name != "int"} for name, r in ratios.items()}
        return {"shape_class": shape_class, "peers": peers}

    rows = [row("a", x=3.0, y=2.0), row("a", x=0.9, int=0.1), row("c", z=1.0), row("d")]
    assert float_ratios(rows) == {"a": 0.9, "c": 1.0}
    # What has no float form is held to what would run instead.
    assert float_ratios([row("b", int=1.3)]) == {"b": 1.3}


@pytest.fixture
def tables(monkeypatch):
    """The tile tables of the made-up unit: a default, and none for the device."""
    written = {"default": {"large": DEFAULT}}
    monkeypatch.setattr(gpu_tune, "read_tiles", lambda op, slug="default": written.get(slug, {}))


@pytest.mark.usefixtures("tables")
def test_sweep_kernel_when_some_tiles_are_wrong_then_takes_the_fastest_that_is_right(gpu, clock):
    found = sweep_kernel(gpu, doubling(clock, SECONDS), "large")
    assert found.best == FAST
    assert found.speed_up == pytest.approx(2 / 1.5)
    assert found.tried == 2
    assert found.refused == {"RuntimeError": 1}
    assert found.wrong == [str(WRONG.options())]


@pytest.mark.usefixtures("tables")
def test_sweep_kernel_when_nothing_is_clearly_faster_then_keeps_the_default(gpu, clock):
    found = sweep_kernel(gpu, doubling(clock, {**SECONDS, FAST: 1.97e-3}), "large")
    assert (found.best, found.speed_up) == (DEFAULT, 1.0)


def test_tables_when_rows_were_not_measured_now_then_keep_them(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_tune, "read_tiles", lambda op, slug: {"small": SAME, "large": DEFAULT})
    file = write_tiles("doubling", "made_up", {"large": FAST}, folder=tmp_path)
    assert file == tmp_path / "doubling" / "tiles" / "made_up.json"
    assert json.loads(file.read_text()) == {"small": SAME.options(), "large": FAST.options()}
    write_measured("doubling", "made_up", {"large": 1.5, "small": 0.9}, folder=tmp_path)
    file = write_measured("doubling", "made_up", {"large": 1.75004}, folder=tmp_path)
    assert json.loads(file.read_text()) == {"large": 1.75, "small": 0.9}


def test_results_when_a_part_is_measured_again_then_keep_other_parts_and_rows(tmp_path):
    def row(op, case, value):
        return {"op": op, "case": case, "median_us": value}

    first = {"kernels": [row("a", "1", 1.0), row("b", "1", 2.0)], "checks": [{"op": "a"}]}
    write_gpu_results("made_up", {"device": "x"}, first, folder=tmp_path)
    again = {"kernels": [row("a", "1", 9.0)]}
    file = write_gpu_results("made_up", {"device": "y"}, again, folder=tmp_path)
    found = json.loads(file.read_text())
    assert found["conditions"] == {"device": "y"}
    assert found["kernels"] == [row("b", "1", 2.0), row("a", "1", 9.0)]
    assert found["checks"] == [{"op": "a"}]


def test_measure_model_when_half_precision_runs_then_times_the_model_beside_it(clock, monkeypatch):
    def compiled(model, example, dtype):
        if dtype is torch.bfloat16:
            raise NotImplementedError("no bf16 here")

        def call():
            clock["seconds"] = 3.2e-3
            return model(example)

        return call

    def quantized(model, calibration, example):
        def call():
            clock["seconds"] = 1e-3
            return 1.01 * model(example)

        return call

    monkeypatch.setattr(gpu_models, "_compiled", compiled)
    monkeypatch.setattr(gpu_models, "_quantized", quantized)
    case = ModelCase(
        name="conv",
        make=lambda: nn.Conv2d(3, 4, 3),
        batch=2,
        targets={"torch.compile fp16 channels-last": 1.6},
        size=8,
    )
    failed, ours, half = measure_model(case, CPU, FakeTimer(clock), rounds=3)
    assert failed["failure"] == "NotImplementedError: no bf16 here"
    assert ours["median_ms"] == 1.0
    assert ours["sqnr_db"] == pytest.approx(40.0, abs=0.1)
    assert (half["ratio"], half["target"], half["met"]) == (3.2, 1.6, True)


def test_quantized_model_when_called_then_gives_nearly_the_float_result():
    """On a CPU the fused operators run their definitions."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 40), nn.ReLU(), nn.Linear(40, 10)).eval()
    example = torch.randn(2, 3, 4, 4)
    call = gpu_models._quantized(model, example, example)
    with torch.no_grad():
        wanted = model(example)
    assert (call() - wanted).abs().max() < 0.05 * wanted.abs().max()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_main_when_there_is_no_gpu_then_says_so(capsys):
    assert main([]) == 2
    assert "benchmarks.gpu needs an NVIDIA GPU" in capsys.readouterr().err
