"""Every example runs as a user runs it: a fresh process, from the checkout's root."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pt2e_quant as pq
from pt2e_quant.backends.artifact import Artifact

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


def load(path: Path) -> Artifact:
    """Load an example's file in this process, which did not make it."""
    return pq.backends.get({".pte": "xnnpack", ".onnx": "onnx"}[path.suffix]).load(path)


def check_batches_of_other_sizes(path: Path) -> None:
    """Hold batches of sizes that the example did not use to their samples one by one."""
    artifact = load(path)
    (image,) = artifact.capture.inputs
    samples = torch.randn(11, *image.shape[1:], generator=torch.Generator().manual_seed(0))
    alone = torch.cat([artifact.run(samples[at : at + 1]) for at in range(len(samples))])
    for count in (1, 3, 11, 2, 11):
        for _ in range(2):
            torch.testing.assert_close(artifact.run(samples[:count]), alone[:count])


def check_prompts_of_other_lengths(path: Path) -> None:
    """Hold prompts of lengths that the example did not use to their tokens one by one."""
    artifact = load(path)
    ids = torch.randint(0, 256, (1, 11), generator=torch.Generator().manual_seed(0))
    alone = torch.cat(
        [artifact.run(ids[:, at : at + 1], torch.tensor([at])).clone() for at in range(11)], dim=1
    )
    for count in (1, 3, 11, 2, 11):
        artifact.reset()
        found = artifact.run(ids[:, :count], torch.arange(count))
        torch.testing.assert_close(found, alone[:, :count], atol=0.02, rtol=0.02)


@pytest.fixture(autouse=True)
def _runtimes_installed():
    for package in ("executorch", "onnxruntime", "onnxscript", "sklearn"):
        pytest.importorskip(package, reason=f"the examples need {package}")


def test_quickstart_when_run_then_trains_quantizes_and_prints_the_table(tmp_path):
    done = run_example("quickstart.py", "--epochs", "5", "--keep", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line for line in done.stdout.splitlines() if line.startswith("│")]
    assert [row.split("│")[1].strip() for row in rows] == ["xnnpack", "onnx"]
    for suffix in (".pte", ".onnx"):
        floating, quantized = (tmp_path / f"{kind}{suffix}" for kind in ("float", "int8"))
        assert quantized.stat().st_size < 0.5 * floating.stat().st_size
        check_batches_of_other_sizes(quantized)


def test_llm_w4_when_run_then_trains_and_saves_small_files_for_prompts_of_any_length(tmp_path):
    pytest.importorskip("transformers", reason="the example needs transformers")
    done = run_example("llm_w4.py", "--steps", "60", "--keep", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.split("│") for line in done.stdout.splitlines() if line.startswith("│")]
    assert [row[1].strip() for row in rows] == ["xnnpack", "onnx"]
    for suffix in (".pte", ".onnx"):
        assert (tmp_path / f"llama_w4{suffix}").stat().st_size < 400_000
        check_prompts_of_other_lengths(tmp_path / f"llama_w4{suffix}")


def test_qat_when_run_then_trains_ternary_weights_and_saves_a_file(tmp_path):
    done = run_example("qat.py", "--keep", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    found = {
        line[:24].strip(): float(line[25:30]) for line in done.stdout.splitlines() if "." in line
    }
    assert found["ternary weights, trained"] > found["ternary weights, rounded"]
    assert (tmp_path / "digits_ternary.pte").stat().st_size < 600_000
    check_batches_of_other_sizes(tmp_path / "digits_ternary.pte")


def test_own_cpu_kernel_when_run_then_it_is_used_and_reported():
    done = run_example("own_cpu_kernel.py")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "pool_uint8" in done.stdout


def test_own_uint8_format_when_run_then_it_trains_like_float32_in_a_quarter_of_the_bytes():
    done = run_example("own_uint8_format.py", "--epochs", "6")
    assert done.returncode == 0, done.stderr[-3000:]
    plain, own, last = done.stdout.splitlines()
    accuracies = [float(line.split("%")[0].split()[-1]) for line in (plain, own)]
    assert accuracies[1] > accuracies[0] - 0.5
    # codes, a scale for each of 128 rows and the table
    assert f"{64 * 128 + 4 * 128 + 4 * 255} bytes" in own
    assert last == f"gradients torch.bfloat16, quantized {6 * 28} times"


def test_write_a_backend_when_run_then_lowers_its_three_operators_and_loads_the_file():
    done = run_example("write_a_backend.py")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "4: 1 toy_add, 3 toy_product" in done.stdout
    assert "Toy has no int8 form of it" in done.stdout


def test_examples_when_read_then_each_is_short():
    for path in (ROOT / "examples").glob("*.py"):
        lines = 150 if path.name == "write_a_backend.py" else 120
        assert len(path.read_text().splitlines()) <= lines, path.name
