"""The container: named tensors and one JSON text in a safetensors file, every byte checked.

A file is what the safetensors format says: 8 bytes of header length, a JSON header, the tensors'
bytes. Its header's metadata name the format, its version, and the sha256 of the program; the
program (JSON, zlib) is one of the tensors, and holds the sha256 of every other. Nothing in it is
code.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pt2e_quant.core.errors import ArtifactError

FORMAT = "pt2e_quant"
VERSION = 1
"""The version of the format that this package writes; it reads this one and all before it."""

PROGRAM = "pt2e_quant.program"
"""The name of the tensor that holds the program's text."""

MOST_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library itself."""

MOST_PROGRAM_BYTES = 1 << 30
"""The most bytes that the program's text may unpack to."""

SAFETENSORS_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Tensors of any other dtype are stored as their bytes; the program knows the dtype."""


def is_archive(path: Path) -> bool:
    """True if a file begins as an archive of this format does, whole or damaged."""
    try:
        with path.open("rb") as stream:
            start = stream.read(512)
    except OSError:
        return False
    return f'"format":"{FORMAT}"'.encode() in start


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor's elements in order; on the CPU and contiguous they are not copied."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if not flat.numel():
        return memoryview(b"")
    array: Any = flat.view(torch.uint8).numpy()  # a buffer, which numpy's stubs do not say
    return memoryview(array)


def damaged(path: Path, how: str, *, fix: str | None = None) -> ArtifactError:
    """The error of a file that cannot be trusted."""
    return ArtifactError(
        f"{path} is damaged: {how}", fix=fix or "copy it again, or write it with pt2e_quant.save"
    )


@contextmanager
def reported(path: Path) -> Iterator[None]:
    """Turn what the system says of a path into the package's error."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise ArtifactError(f"cannot read or write {path}: {reason}") from error
