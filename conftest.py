"""What pytest leaves out (doctests of backends whose extra is absent), and its own options."""

import gc
import os
import tomllib
from collections import Counter
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest

# Graphs are verified between the passes of every pipeline, also in the processes that tests start.
os.environ.setdefault("PT2E_QUANT_VERIFY", "1")
# What is slower in integers is the same on every machine; of this CPU cpu kernels have no times.
os.environ.setdefault("PT2E_QUANT_MEASURED_CPU", "cpu_avx512_bf16")
# Before torch is imported: workers that each start a thread for every core wait for each other.
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0)):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))

_NEEDS = {
    "xnnpack": ("executorch",),
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
}

collect_ignore = [
    str(Path("pt2e_quant") / "backends" / backend)
    for backend, packages in _NEEDS.items()
    if any(find_spec(package) is None for package in packages)
]

_TO_THE_END = ExitStack()
_LONG = Path(__file__).parent / "tests" / "long_running.toml"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The search of `tests/fuzz`: which models are drawn."""
    parser.addoption("--models", type=int, default=120, help="drawn models to run")
    parser.addoption("--start", type=int, default=0, help="the first model's seed")
    parser.addoption("--shrink", type=int, default=0, help="trials to shrink each failure")


@pytest.hookimpl(tryfirst=True)  # before pytest's own, which leaves out what `-m` does
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark cases of long tests slow but every n-th; one that is asked for by name is its first."""
    strides = tomllib.loads(_LONG.read_text())
    count: Counter[str] = Counter()
    for item in items:
        if item.get_closest_marker("slow") is not None:
            continue
        test = item.nodeid.partition("[")[0]
        path, _, name = test.removeprefix("tests/").partition("::")
        if count[test] % strides.get(path, {}).get(name, 1):
            item.add_marker(pytest.mark.slow)
        count[test] += 1


def pytest_collection_finish() -> None:
    """Let collections walk only what tests make: torch's modules and all tests stay."""
    from pt2e_quant.accelerate.pause_gc import collect_new

    gc.collect()
    _TO_THE_END.enter_context(collect_new())


def pytest_sessionfinish() -> None:
    """Leave the collector as it was."""
    _TO_THE_END.close()
