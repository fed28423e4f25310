"""Is every kernel what its reference says, on shapes drawn at random; are its accesses sound?"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from benchmarks.kernels.bench_case import Bench, Bound

__all__ = ["Check", "check_kernel", "difference", "run_sanitizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What the check of one kernel found.

    Args:
        op: the bench's name.
        draws: how many shapes were tried.
        failures: what was wrong, by seed; empty if nothing was.
    """

    op: str
    draws: int
    failures: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """As a row of the results."""
        return asdict(self)


def difference(made: object, wanted: object, bound: Bound) -> str | None:
    """How a result is further from the reference than it may be; None if it is not."""
    ours, theirs = pytree.tree_leaves(made), pytree.tree_leaves(wanted)
    if len(ours) != len(theirs):
        return f"{len(ours)} results, not {len(theirs)}"
    for place, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        found = _leaf_difference(a.cpu(), b.cpu(), bound)
        if found is not None:
            return f"result {place}: {found}"
    return None


def _leaf_difference(a: Tensor, b: Tensor, bound: Bound) -> str | None:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"{a.dtype}{list(a.shape)}, not {b.dtype}{list(b.shape)}"
    if a.numel() == 0:
        return None
    if b.dtype is torch.float8_e4m3fn:
        a, b = _places(a), _places(b)
    if not b.dtype.is_floating_point:
        steps = int((a.long() - b.long()).abs().max())
        return f"{steps} steps from the reference" if steps > bound.lsb else None
    a, b = a.double(), b.double()
    error = (a - b).abs()
    # Equal infinities have no difference, and NaN where it is expected is right.
    equal = (a == b) | (a.isnan() & b.isnan())
    wrong = ~(equal | (error <= bound.atol + bound.rtol * b.abs()))
    if not wrong.any():
        return None
    return f"{int(wrong.sum())} of {wrong.numel()} values wrong, by up to {float(error.max()):.3g}"


def _places(codes: Tensor) -> Tensor:
    """The places of 8-bit floats among all in order; both zeros are 0."""
    bits = codes.view(torch.uint8).int()
    return torch.where(bits < 128, bits, 128 - bits)


def check_kernel(bench: Bench[Any], device: torch.device, seeds: Sequence[int]) -> Check:
    """Compare a kernel with its reference, which runs on the CPU, on one shape for each seed."""
    failures = []
    for seed in seeds:
        operands = bench.draw(device, seed)
        on_cpu = pytree.tree_map_only(Tensor, lambda t: t.cpu(), operands)
        found = difference(
            bench.call(operands, None), bench.reference(on_cpu), bench.bound(operands)
        )
        if found is not None:
            shapes = [list(t.shape) for t in pytree.tree_leaves(operands) if isinstance(t, Tensor)]
            failures.append(f"seed {seed}, shapes {shapes}: {found}")
    return Check(op=bench.name, draws=len(seeds), failures=tuple(failures))


def run_sanitizer(ops: Sequence[str]) -> str:
    """Run the checks under NVIDIA's compute-sanitizer; "clean", or what is to be said instead."""
    tool = shutil.which("compute-sanitizer") or _beside_cuda()
    if tool is None:
        return "compute-sanitizer is not installed"
    command = [sys.executable, "-m", "benchmarks.gpu", "--only-check", "--seeds", "3"]
    done = subprocess.run(
        [tool, "--tool", "memcheck", "--error-exitcode", "9", *command, "--ops", *ops],
        # An allocator that hands out parts of large blocks would hide what is out of bounds.
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return "clean" if done.returncode == 0 else f"exit {done.returncode}: {done.stdout[-2000:]}"


def _beside_cuda() -> str | None:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    tool = Path(home) / "bin" / "compute-sanitizer"
    return str(tool) if tool.exists() else None
