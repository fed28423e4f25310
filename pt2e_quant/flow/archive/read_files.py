"""Read an archive; its checksum is compared before anything else is used."""

import hashlib
import json
import math
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from mmap import ACCESS_COPY
from mmap import mmap as map_file
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from pt2e_quant.core.errors import ArtifactError
from pt2e_quant.flow.archive.layout import (
    FORMAT,
    MOST_HEADER_BYTES,
    MOST_PROGRAM_BYTES,
    PROGRAM,
    SAFETENSORS_NAMES,
    VERSION,
    bytes_of,
    damaged,
    reported,
)


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of an archive.

    Attributes:
        program: the JSON value that was written.
        tensors: the parts by name, on the CPU.
        size_bytes: of all files together.
    """

    program: Any
    tensors: Mapping[str, Tensor]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor as the program's table has it."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str
    shard: int


@dataclass(frozen=True, slots=True)
class Program:
    """The outer program: the table of tensors, the further shards, and what was written."""

    file: "File"
    parts: Mapping[str, Part]
    shards: tuple[str, ...]
    value: Any


def read_archive(path: Path, *, mmap: bool = False, verify: bool = True) -> Contents:
    """Read an archive.

    Args:
        path: of its first file.
        mmap: map the files and do not copy them; writes stay in memory, as copies of pages.
        verify: compare every tensor with its checksum (the program is compared always).

    Raises:
        ArtifactError: a file is missing, damaged, of a newer version, or something else.
    """
    if not path.is_file():
        raise ArtifactError(f"there is no file {path}", fix="pt2e_quant.save(program, path)")
    tensors: dict[str, Tensor] = {}
    size = 0
    with reported(path):
        with path.open("rb") as stream:
            outer = read_program(path, stream)
            _read_parts(outer, 0, stream, tensors, mmap=mmap, verify=verify)
            size += outer.file.size
        for number, name in enumerate(outer.shards, start=1):
            with _open_shard(path.with_name(name)) as stream:
                shard = File(path.with_name(name), stream)
                if shard.metadata.get("shard") != name:
                    raise damaged(shard.path, "it is not the shard its name says")
                _read_parts(
                    Program(shard, outer.parts, (), None),
                    number,
                    stream,
                    tensors,
                    mmap=mmap,
                    verify=verify,
                )
                size += shard.size
    return Contents(outer.value, tensors, size)


def _read_parts(
    outer: Program,
    number: int,
    stream: BinaryIO,
    tensors: dict[str, Tensor],
    *,
    mmap: bool,
    verify: bool,
) -> None:
    """Add the tensors of one file."""
    file = outer.file
    expected = {name: part for name, part in outer.parts.items() if part.shard == number}
    if file.entries.keys() - {PROGRAM} != expected.keys():
        raise damaged(file.path, "it holds other tensors than its program names")
    # A copy on write: what is written to a tensor stays in memory.
    whole = map_file(stream.fileno(), 0, access=ACCESS_COPY) if mmap else None
    for name, part in expected.items():
        tensors[name] = file.tensor(name, part, stream, whole, verify=verify)


def _open_shard(path: Path) -> BinaryIO:
    if not path.is_file():
        raise ArtifactError(
            f"the shard {path} is missing", fix="keep all files of one save in one folder"
        )
    return path.open("rb")


class File:
    """One file of an archive: its header, checked.

    Args:
        path: of the file.
        stream: open at its begin.
    """

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self.path = path
        self.size = os.fstat(stream.fileno()).st_size
        start = stream.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > min(self.size - 8, MOST_HEADER_BYTES):
            raise damaged(
                path,
                f"its header is cut off at {self.size} bytes, or pt2e_quant.save did not write it",
                fix="a file that an artifact saved is read by its backend, a .pte so: "
                'pq.backends.get("xnnpack").load(path)',
            )
        try:
            header = json.loads(stream.read(length))
            metadata = header.pop("__metadata__")
            self.metadata = {str(k): str(v) for k, v in metadata.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise damaged(path, f"its header is no JSON of this format ({error})") from error
        self._check_format()
        self.begin = 8 + length
        self.entries = {str(name): _entry(path, entry) for name, entry in header.items()}
        self._check_cover()

    def _check_format(self) -> None:
        if self.metadata.get("format") != FORMAT:
            raise ArtifactError(
                f"{self.path} is a safetensors file, but not one of pt2e_quant.save",
                fix="pt2e_quant.save(program, path)",
            )
        version = self.metadata.get("version", "")
        if not version.isdecimal() or int(version) < 1:
            raise damaged(self.path, f'its version is "{version}"')
        if int(version) > VERSION:
            raise ArtifactError(
                f"{self.path} is of format version {version}, this package reads up to {VERSION}",
                fix="pip install -U pt2e-quant",
            )

    def _check_cover(self) -> None:
        """Every byte belongs to one tensor: no gap, no overlap, no rest."""
        place = 0
        for _, _, (first, last) in sorted(self.entries.values(), key=lambda e: e[2]):
            if first != place or last < first:
                raise damaged(self.path, "its tensors overlap or leave gaps")
            place = last
        if self.begin + place != self.size:
            expected = self.begin + place
            raise damaged(self.path, f"it has {self.size:,} bytes, expected {expected:,}")

    def tensor(
        self, name: str, part: Part, stream: BinaryIO, whole: map_file | None, *, verify: bool
    ) -> Tensor:
        """One tensor, compared with what the program says of it.

        Args:
            name: of the tensor.
            part: its entry in the program's table.
            stream: of this file.
            whole: this file's bytes, mapped; None to read the tensor into memory of its own.
            verify: compare it with its checksum.
        """
        stored, shape, (first, last) = self.entries[name]
        dtype = getattr(torch, part.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise damaged(self.path, f'"{name}" has the dtype "{part.dtype}", which torch lacks')
        length = math.prod(part.shape) * dtype.itemsize
        expected: tuple[str, tuple[int, ...]] = ("U8", (length,))
        if dtype in SAFETENSORS_NAMES:
            expected = (SAFETENSORS_NAMES[dtype], part.shape)
        if (stored, shape) != expected or last - first != length:
            raise damaged(self.path, f'"{name}" differs in dtype or shape from its program')
        held = self._bytes(first, last, stream, whole)
        if verify and hashlib.sha256(bytes_of(held)).hexdigest() != part.sha256:
            raise damaged(self.path, f'the checksum of "{name}" differs')
        if held.data_ptr() % dtype.itemsize:
            held = held.clone()  # the file of another writer may not align them
        return held.view(dtype).reshape(part.shape)

    def _bytes(self, first: int, last: int, stream: BinaryIO, whole: map_file | None) -> Tensor:
        if whole is not None and last > first:
            # A storage of its own: exporters write storages, not tensors.
            return torch.frombuffer(
                whole, dtype=torch.uint8, offset=self.begin + first, count=last - first
            )
        stream.seek(self.begin + first)
        held = torch.empty(last - first, dtype=torch.uint8)
        if _read_into(stream, held) != last - first:
            raise damaged(self.path, "it changed while it was read")
        return held


def _read_into(stream: Any, held: Tensor) -> int:
    array: Any = held.numpy()
    return int(stream.readinto(memoryview(array)))


def _entry(path: Path, entry: Any) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    try:
        first, last = (int(v) for v in entry["data_offsets"])
        return str(entry["dtype"]), tuple(int(v) for v in entry["shape"]), (first, last)
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(path, f"its header is no JSON of this format ({error})") from error


def read_program(path: Path, stream: BinaryIO) -> Program:
    """The first file's header and its program, compared with its checksum.

    Raises:
        ArtifactError: it is damaged, of a newer version, or something else.
    """
    file = File(path, stream)
    if PROGRAM not in file.entries:
        is_shard = "shard" in file.metadata
        fix = "load the first file, whose name has no number" if is_shard else None
        raise damaged(path, "it holds no program", fix=fix)
    first, last = file.entries[PROGRAM][2]
    stream.seek(file.begin + first)
    packed = stream.read(last - first)
    if hashlib.sha256(packed).hexdigest() != file.metadata.get("sha256"):
        raise damaged(path, "the checksum of its program differs")
    try:
        unzip = zlib.decompressobj()
        outer = json.loads(unzip.decompress(packed, MOST_PROGRAM_BYTES))
        parts = {str(name): _part(entry) for name, entry in outer["parts"].items()}
        shards = tuple(str(name) for name in outer["shards"])
        value = outer["program"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, zlib.error) as error:
        raise damaged(path, f"its program cannot be read ({error})") from error
    if any(Path(name).name != name or name in (".", "..") for name in shards):
        raise damaged(path, "a shard is named outside of its folder")
    return Program(file, parts, shards, value)


def _part(entry: Any) -> Part:
    dtype, shape, sha256, shard = entry
    return Part(str(dtype), tuple(int(v) for v in shape), str(sha256), int(shard))
