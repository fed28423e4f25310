"""FSDP2, tensor parallelism and checkpoints on several ranks: see `rank_cells`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
REFUSED = {
    "tp blockwise": "shards may cut blocks",
    "tp int8": "int8 training takes no DTensor",
    "fsdp stored per tensor": "rows share scales",
    "fsdp stored grad_dtype": "the gradient of a shard has the parameter's dtype",
    "tp stored grad_dtype": "the gradient of a shard has the parameter's dtype",
    "tp stored cut": "would cut its blocks of scales",
}


def run_ranks(count, folder):
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("rank_cells.py")), str(count), str(folder)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / f"results{count}.pt", weights_only=True)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    if not torch.distributed.is_available():
        pytest.skip("torch is built without distributed")
    folder = tmp_path_factory.mktemp("ranks")
    return folder, run_ranks(2, folder)


def check(results):
    for name, result in results.items():
        if name in REFUSED:
            assert REFUSED[name] in result["error"], name
            continue
        assert "error" not in result, (name, result)
        if name.split()[0] in ("save", "load"):
            assert flat(result["found"]) == flat(result["expected"]), name
        else:
            # Float32 sums in another order. From the third loss on, states in few bits have been
            # read back: a sum that is rounded otherwise falls on another code now and then, and a
            # state whose shard cuts its blocks has others (2.1e-3 under TP on a CPU with AMX).
            rtol = 2e-5 if "bit" not in name else 5e-3 if name.startswith("tp") else 2e-3
            found, expected = result["found"].tolist(), result["expected"].tolist()
            # An output beside zero is a sum of numbers about 1.
            near_zero = 1e-6 if "quantized" in name else 0.0
            assert found == pytest.approx(expected, rel=rtol, abs=near_zero), name
            if "bit" in name:
                assert found[:2] == pytest.approx(expected[:2], rel=2e-5), name
            layout = "packed" if "w4" in name else "plain"
            assert result["stored"] == ({(layout, 3)} if "stored" in name else set()), name


def flat(state, path=""):
    """A nested state as names to lists, which compare with ==."""
    if isinstance(state, dict):
        return {k: v for key, part in state.items() for k, v in flat(part, f"{path}/{key}").items()}
    if not isinstance(state, torch.Tensor):
        return {path: state}
    return {path: (str(state.dtype), state.tolist())}


def test_training_when_on_two_ranks_then_losses_and_checkpoints_are_those_of_one_process(two):
    _, results = two
    assert {name.split()[0] for name in results} == {"fsdp", "ddp", "tp", "save"}
    check(results)


@pytest.mark.slow
def test_training_when_on_four_ranks_then_the_same_and_checkpoints_of_two_load(two):
    folder, _ = two
    results = run_ranks(4, folder)
    assert {name.split()[0] for name in results} == {"fsdp", "ddp", "tp", "load"}
    check(results)
