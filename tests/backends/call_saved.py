"""Saved artifacts and archives loaded and called in a process of their own, as users do."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim

import pt2e_quant as pq

SCRIPT = """
import sys
import torch
import pt2e_quant as pq
from pt2e_quant.backends import registry

torch.set_num_threads(1)
torch.set_grad_enabled(False)
jobs = torch.load(sys.argv[1], weights_only=False)
results = []
for backend, path, calls in jobs:
    call = registry.get(backend).load(path).run if backend else pq.load(path)
    results.append([call(*args) for args in calls])
torch.save(results, sys.argv[2])
"""


@dataclass(frozen=True)
class Saved:
    """A file, the backend it is for ("" for an archive of pq.save), and the calls, in order."""

    backend: str
    path: Path
    calls: Sequence[tuple[Any, ...]]


def call_saved(files: Sequence[Saved], folder: Path) -> list[list[Any]]:
    """The results of all calls of all files. A process that crashes fails the test."""
    jobs, results = folder / "jobs.pt", folder / "results.pt"
    torch.save([(f.backend, str(f.path), list(f.calls)) for f in files], jobs)
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", SCRIPT, jobs, results],
        capture_output=True,
        text=True,
        # glibc fills memory that is freed: results that read it are wrong, not right by chance.
        env={**os.environ, "MALLOC_PERTURB_": "165"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(results, weights_only=False)


def call_pte(artifact: Any, calls: Sequence[tuple[Any, ...]], folder: Path) -> list[Any]:
    """The results of all calls of a `.pte`, saved, and loaded in a process of its own."""
    path = folder / "artifact.pte"
    artifact.save(path)
    (results,) = call_saved([Saved("xnnpack", path, calls)], folder)
    return results


def pte_of_batches(model: torch.nn.Module, data: Sequence[tuple[Any, ...]]) -> Any:
    """A `.pte` of a model that takes `x` in batches of 1 to 8, calibrated with data."""
    return pq.quantize(
        model,
        data[0],
        dynamic_shapes={"x": {0: Dim("batch", min=1, max=8)}},
        calibration_data=data,
        backend="xnnpack",
        progress=False,
    )
