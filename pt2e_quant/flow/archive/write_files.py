"""Write an archive: every tensor is hashed, then written, one at a time."""

import hashlib
import json
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pt2e_quant.core.errors import ArtifactError
from pt2e_quant.core.whole_file import whole_file
from pt2e_quant.flow.archive.layout import (
    FORMAT,
    PROGRAM,
    SAFETENSORS_NAMES,
    VERSION,
    bytes_of,
    reported,
)
from pt2e_quant.flow.archive.read_files import read_program

__all__ = ["write_archive"]


def write_archive(
    path: Path, program: Mapping[str, Any], tensors: Mapping[str, Tensor], shard_bytes: int | None
) -> None:
    """Write a program and its tensors; temporary names first, then renamed.

    Args:
        path: of the file; further shards stand beside it.
        program: a JSON value.
        tensors: contiguous, any device; written one at a time.
        shard_bytes: begin another file where one would grow beyond this many bytes of tensors.

    Raises:
        ArtifactError: the path cannot be written.
    """
    shards = _distribute(tensors, shard_bytes)
    hashes = {name: hashlib.sha256(bytes_of(t)).hexdigest() for name, t in tensors.items()}
    digest = hashlib.sha256("".join(hashes.values()).encode()).hexdigest()[:12]
    names = [f"{path.stem}-{digest}-{i:05d}{path.suffix}" for i in range(1, len(shards))]
    table = {
        name: [_name_of(t.dtype), list(t.shape), hashes[name], number]
        for number, shard in enumerate(shards)
        for name, t in shard.items()
    }
    text = json.dumps(
        {"version": VERSION, "parts": table, "shards": names, "program": program},
        allow_nan=False,
        separators=(",", ":"),
    )
    packed = torch.frombuffer(bytearray(zlib.compress(text.encode(), 6)), dtype=torch.uint8)
    metadata = {"format": FORMAT, "version": str(VERSION)}
    main = metadata | {"sha256": hashlib.sha256(bytes_of(packed)).hexdigest()}
    old = _shards_of(path)
    with reported(path):
        for name, shard in zip(names, shards[1:], strict=True):
            _write_file(path.with_name(name), metadata | {"shard": name}, shard)
        _write_file(path, main, {PROGRAM: packed, **shards[0]})
        for name in set(old) - set(names):
            path.with_name(name).unlink(missing_ok=True)


def _distribute(tensors: Mapping[str, Tensor], shard_bytes: int | None) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        length = tensor.numel() * tensor.element_size()
        if shard_bytes is not None and shards[-1] and size + length > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += length
    return shards


def _write_file(path: Path, metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
    # Wide elements first: then every tensor begins at a multiple of its element's size.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    place = 0
    for name, tensor in ordered:
        length = tensor.numel() * tensor.element_size()
        known = tensor.dtype in SAFETENSORS_NAMES
        header[name] = {
            "dtype": SAFETENSORS_NAMES.get(tensor.dtype, "U8"),
            "shape": list(tensor.shape) if known else [length],
            "data_offsets": [place, place + length],
        }
        place += length
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with whole_file(path) as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            stream.write(bytes_of(tensor))


def _shards_of(path: Path) -> tuple[str, ...]:
    """The further shards of the file that is there, none if there is none that can be read."""
    with suppress(ArtifactError, OSError), path.open("rb") as stream:
        return read_program(path, stream).shards
    return ()


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
