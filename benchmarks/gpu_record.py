"""The device that figures are of, and the file that holds them."""

import json
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.results import FOLDER, installed_version

__all__ = ["gpu_conditions", "write_gpu_results"]

Row = Mapping[str, object]
_QUERY = (
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "clocks.max.mem",
    "power.limit",
    "temperature.gpu",
    "mig.mode.current",
)


def gpu_conditions(device: torch.device) -> dict[str, object]:
    """Device, driver, clocks and versions."""
    found = torch.cuda.get_device_properties(device)
    return {
        "device": found.name,
        "capability": f"{found.major}.{found.minor}",
        "multiprocessors": found.multi_processor_count,
        "memory_bytes": found.total_memory,
        "l2_bytes": found.L2_cache_size,
        "nvidia_smi": _smi(device),
        "cuda": torch.version.cuda,
        "packages": {name: installed_version(name) for name in ("torch", "triton", "torchao")},
        "python": platform.python_version(),
    }


def _smi(device: torch.device) -> dict[str, str]:
    """Driver, clocks and limits as nvidia-smi has them; empty where it is not there."""
    if shutil.which("nvidia-smi") is None:
        return {}
    index = torch.cuda.current_device() if device.index is None else device.index
    # By identity: CUDA_VISIBLE_DEVICES renumbers torch's devices, not nvidia-smi's.
    identity = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
    done = subprocess.run(
        [
            "nvidia-smi",
            f"--id={identity}",
            f"--query-gpu={','.join(_QUERY)}",
            "--format=csv,noheader",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return {}
    values = done.stdout.strip().split(", ")
    return dict(zip(_QUERY, values, strict=False))


def write_gpu_results(
    slug: str,
    conditions: Mapping[str, object],
    parts: Mapping[str, Sequence[Row]],
    *,
    folder: Path = FOLDER,
) -> Path:
    """`benchmarks/results/gpu_<slug>.json`; a part that was not run keeps its earlier rows.

    Rows of kernels that were not run are kept, too; those that were are replaced.
    """
    file = folder / f"gpu_{slug}.json"
    old: dict[str, list[Row]] = json.loads(file.read_text()) if file.exists() else {}
    texts = [f'"conditions": {json.dumps(conditions)}']
    for part in sorted({*parts, *old} - {"conditions"}):
        new = parts.get(part, ())
        fresh = {_identity(row) for row in new}
        kept = [row for row in old.get(part, []) if _identity(row) not in fresh]
        lines = ",\n".join(json.dumps(row) for row in [*kept, *new])
        texts.append(f'"{part}": [\n{lines}\n]')
    folder.mkdir(exist_ok=True)
    file.write_text("{" + ",\n".join(texts) + "}\n")
    return file


def _identity(row: Row) -> tuple[object, ...]:
    keys = ("op", "case", "shape_class", "model", "batch", "program")
    # A row of a sweep has no case.
    return tuple(row.get(key) for key in keys)
