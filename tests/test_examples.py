"""Every example runs as a user runs it: a fresh process, from the checkout's root."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run_example(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "120", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )


@pytest.fixture(autouse=True)
def _runtimes_installed():
    for package in ("executorch", "onnxruntime", "onnxscript", "sklearn"):
        pytest.importorskip(package, reason=f"the examples need {package}")


def test_quickstart_trains_quantizes_and_prints_the_table(tmp_path):
    done = run_example("quickstart.py", "--epochs", "5", "--keep", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line for line in done.stdout.splitlines() if line.startswith("│")]
    assert [row.split("│")[1].strip() for row in rows] == ["xnnpack", "onnx"]
    for suffix in (".pte", ".onnx"):
        floating, quantized = (tmp_path / f"{kind}{suffix}" for kind in ("float", "int8"))
        assert quantized.stat().st_size < 0.5 * floating.stat().st_size


def test_llm_w4_trains_quantizes_and_keeps_the_perplexity(tmp_path):
    pytest.importorskip("transformers", reason="the example needs transformers")
    done = run_example("llm_w4.py", "--steps", "60", "--keep", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.split("│") for line in done.stdout.splitlines() if line.startswith("│")]
    assert [row[1].strip() for row in rows] == ["xnnpack", "onnx"]
    for suffix in (".pte", ".onnx"):
        assert (tmp_path / f"llama_w4{suffix}").stat().st_size < 400_000


def test_qat_trains_three_bit_weights_and_saves_a_file(tmp_path):
    done = run_example("qat.py", "--epochs", "2", "--keep", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    found = {
        line[:24].strip(): float(line[25:30]) for line in done.stdout.splitlines() if "." in line
    }
    assert found["3-bit weights, trained"] > found["3-bit weights, rounded"]
    assert (tmp_path / "digits_w3.pte").stat().st_size < 600_000


def test_own_cpu_kernel_is_used_and_reported():
    done = run_example("own_cpu_kernel.py")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "pool_uint8" in done.stdout


def test_every_example_is_short():
    for path in (ROOT / "examples").glob("*.py"):
        assert len(path.read_text().splitlines()) <= 120, path.name
