"""Data files: named arrays of a .npz, .safetensors or .pt, or batches that a function makes."""

import importlib
import pickle
import re
import sys
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor

from pt2e_quant.core.errors import ArtifactError, InputError, near

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_SAVE_NPZ = "np.savez(path, x=x): one array an input, the samples on its first axis"


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The contents of a data argument: named arrays, or batches as `calibrate` takes them.

    Args:
        label: the argument, for messages.
        arrays: name to array, the samples on the first axis.
        batches: whole batches; None where there are arrays.
    """

    label: str
    arrays: Mapping[str, Tensor] = field(default_factory=dict)
    batches: Iterable[Any] | None = None


def read_data(source: str) -> Data:
    """Read a data argument: a file by its suffix, or "module:function".

    Raises:
        ArtifactError: the file is missing, damaged, or of another kind.
        InputError: the file or the function gives something that is no data.
    """
    path = Path(source)
    if not path.exists() and _FUNCTION.fullmatch(source):
        return _call_function(source)
    readers = {".npz": _read_npz, ".safetensors": _read_safetensors, ".pt": _read_pt}
    reader = readers.get(path.suffix)
    if reader is None:
        raise ArtifactError(
            f'{source}: a data file ends in .npz, .safetensors or .pt, not "{path.suffix}"',
            fix=f"{_SAVE_NPZ}; or give module:function",
        )
    if not path.is_file():
        raise ArtifactError(
            f"there is no data file {source}", fix="check the path; it is read from here"
        )
    data = reader(path)
    if data.batches is None and not data.arrays:
        raise InputError(f"{source} holds no arrays", fix=_SAVE_NPZ)
    return data


def _read_npz(path: Path) -> Data:
    try:
        # An open file: numpy leaves its own open when the archive is damaged.
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            arrays = {name: torch.from_numpy(archive[name]) for name in archive.files}
    except TypeError as error:
        raise InputError(
            f"{path}: an array has a dtype that torch does not have: {error}",
            fix="save numbers: array.astype(np.float32)",
        ) from error
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        # AttributeError: numpy gives the bare array for a .npy under another name.
        raise ArtifactError(
            f"{path} is damaged or no .npz file: {_first_line(error)}",
            fix=f"write it again, numbers only: {_SAVE_NPZ}",
        ) from error
    return Data(label=str(path), arrays=arrays)


def _read_safetensors(path: Path) -> Data:
    try:
        return Data(label=str(path), arrays=load_file(path))
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise ArtifactError(
            f"{path} is damaged or no .safetensors file: {_first_line(error)}",
            fix="write it again: safetensors.torch.save_file({'x': x}, path)",
        ) from error


def _read_pt(path: Path) -> Data:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch and pickle raise anything on damaged bytes
        raise ArtifactError(
            f"{path} is damaged, or holds more than tensors: {_reason(error)}",
            fix="torch.save({'x': x}, path) with tensors in dicts, lists and tuples only",
        ) from error
    if isinstance(content, Tensor):
        return Data(label=str(path), arrays={path.stem: content})
    if isinstance(content, Mapping) and all(isinstance(v, Tensor) for v in content.values()):
        return Data(label=str(path), arrays={str(k): v for k, v in content.items()})
    if isinstance(content, (list, tuple)):
        return Data(label=str(path), batches=list(content))
    raise InputError(
        f"{path} holds a {type(content).__name__}",
        fix="save a dict of tensors (samples on the first axis) or a list of batches",
    )


def _call_function(source: str) -> Data:
    module_name, _, function_name = source.partition(":")
    module = _import(module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        known = [name for name, value in vars(module).items() if callable(value)]
        raise InputError(
            f'{source}: "{module_name}" has no function "{function_name}": '
            f"{near(function_name, known)}"
        )
    batches = function()
    if isinstance(batches, (Mapping, Tensor, str)) or not isinstance(batches, Iterable):
        raise InputError(
            f"{source} returned a {type(batches).__name__}, expected an iterable of batches",
            fix="return a list of batches, or yield them",
        )
    return Data(label=source, batches=batches)


def import_modules(names: Iterable[str]) -> None:
    """Import modules by name, from the current folder or installed.

    Raises:
        InputError: there is no such module.
    """
    for name in names:
        _import(name)


def _import(name: str) -> ModuleType:
    folder = str(Path.cwd())
    if folder not in sys.path:
        # As `python -m` does: a file beside the model is the usual place for such a function.
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or name.split(".")[0] != error.name.split(".")[0]:
            raise
        raise InputError(
            f'there is no module "{name}" here or installed',
            fix="run from the folder that holds it, or install it",
        ) from error


def _reason(error: Exception) -> str:
    # torch's own text goes on for a page, and advises to load the file without protection.
    if isinstance(error, pickle.UnpicklingError):
        return "loading with weights_only=True failed"
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
