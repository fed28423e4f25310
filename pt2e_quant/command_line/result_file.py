"""Results of many calls as named arrays, and the .npz file they go to."""

import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pt2e_quant.backends.target.backend import Backend
from pt2e_quant.command_line.make_batches import dotted
from pt2e_quant.core.capture import Capture
from pt2e_quant.core.errors import ArtifactError, ConfigError
from pt2e_quant.core.leaf_paths import leaf_paths


def result_names(capture: Capture, leaves: Sequence[Any]) -> list[str]:
    """A name for each leaf of a result: its path, `out` for a bare one."""
    result = capture.unflatten_output(leaves)
    paths = leaf_paths(result)
    if paths is None:
        return [f"out_{index}" for index in range(len(leaves))]
    names = [dotted(pytree.keystr(path)) for path in paths]
    return [f"out_{n}" if n.isdecimal() else n or "out" for n in names]


def join_results(names: Sequence[str], calls: Sequence[Sequence[Any]]) -> dict[str, Tensor]:
    """Each leaf over all calls, joined on the first axis.

    Numbers are stacked; where shapes differ past the first axis (a dynamic sequence length),
    each call keeps an array of its own: `name.0`, `name.1`, …
    """
    joined: dict[str, Tensor] = {}
    for name, values in zip(names, zip(*calls, strict=True), strict=True):
        if any(v is None for v in values):
            continue
        tensors = [torch.as_tensor(v).detach().cpu() for v in values]
        if all(t.dim() == 0 for t in tensors):
            joined[name] = torch.stack(tensors)
        elif len({t.shape[1:] for t in tensors}) == 1:
            joined[name] = torch.cat(tensors)
        else:
            joined |= {f"{name}.{index}": t for index, t in enumerate(tensors)}
    return joined


def check_writable(path: Path) -> None:
    """Refuse a path that cannot be written, before the work that would go into it.

    Raises:
        ArtifactError: naming the path and what is in the way.
    """
    if path.is_dir():
        raise ArtifactError(f"cannot write {path}: it is a folder", fix="give a file name with -o")
    if not path.parent.is_dir():
        raise ArtifactError(
            f"cannot write {path}: there is no folder {path.parent}",
            fix=f"mkdir -p {path.parent}, or another path after -o",
        )
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}."):
            pass
    except OSError as error:
        raise ArtifactError(
            f"cannot write {path}: {error.strerror}", fix="give a path you may write after -o"
        ) from error


def artifact_path(output: Path | None, model: Path, backend: Backend) -> Path:
    """Return an artifact's path: the one given, else beside the model with the backend's suffix.

    Raises:
        ConfigError: the backend writes files of another suffix.
        ArtifactError: the path cannot be written.
    """
    found = model.with_suffix(backend.suffix) if output is None else output
    if found.suffix != backend.suffix:
        raise ConfigError(
            f'{found}: backend "{backend.name}" writes {backend.suffix} files',
            fix=f"-o {found.with_suffix(backend.suffix)}",
        )
    check_writable(found)
    return found


def write_npz(path: Path, arrays: Mapping[str, Tensor]) -> None:
    """Write arrays under a temporary name, then rename it.

    Raises:
        ArtifactError: the path cannot be written.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    values = {name: _to_numpy(tensor) for name, tensor in arrays.items()}
    try:
        # Not numpy.savez, which takes no array named as one of its own parameters ("file").
        with zipfile.ZipFile(temporary, "w") as archive:
            for name, value in values.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                    np.lib.format.write_array(stream, value, allow_pickle=False)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ArtifactError(f"cannot write {path}: {error.strerror}") from error


def _to_numpy(tensor: Tensor) -> np.ndarray:
    # numpy has no bfloat16; float32 holds every value of it.
    held = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    array: np.ndarray = held.numpy()
    return array
