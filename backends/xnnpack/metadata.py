"""The metadata of a `.pte`: the call's pytree and the provenance, as bytes in the program.

Per-channel scales are not said twice. The delegate keeps its scales in the file under a hash of
their bytes, so a record names that hash; written out, the scales of MobileNetV2 take 1.2 % of the
float model.
"""

import hashlib
import zlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule

from pt2e_quant.core.capture import Capture
from pt2e_quant.core.checksum import BLANK
from pt2e_quant.core.errors import ArtifactError
from pt2e_quant.core.provenance import Provenance, RecordKind, choose_record
from pt2e_quant.core.qdq import DequantizePerChannel
from pt2e_quant.core.stored_figures import NO_FIGURES
from pt2e_quant.graph.meta import constant_of

CAPTURE_METHOD = "pt2e_quant_capture"
PROVENANCE_METHOD = "pt2e_quant_provenance"
CHECKSUM_METHOD = "pt2e_quant_checksum"
"""Returns the figures of the check and the checksum of the file: they stand in a constant, and so
inside of the file."""
METADATA_METHODS = (CAPTURE_METHOD, PROVENANCE_METHOD)
"""Methods of the program that return our metadata: zlib of JSON as bytes."""

_PREFIX = "scale_"
_DIGITS = 10
"""Digits of the hash that names scales in a record; scales whose digits collide are written out."""


def scale_key(scales: Any) -> str:
    """The name under which the delegate keeps scales: a hash of their float32 bytes."""
    return _PREFIX + hashlib.sha256(np.asarray(scales, np.float32).tobytes()).hexdigest()


def held_scales(gm: GraphModule) -> set[str]:
    """The keys of the per-channel scales that the delegate will keep for a lowered graph."""
    found = set()
    for node in gm.graph.nodes:
        if node.target is DequantizePerChannel:
            scale: Any = node.args[1]
            value = constant_of(gm, scale)
            if value is not None:
                found.add(scale_key(value.numpy()))
    return found


def pack_metadata(
    capture: Capture,
    provenance: Provenance,
    held: Collection[str],
    record: RecordKind | None = None,
) -> tuple[dict[str, Tensor], Provenance]:
    """The constant methods that keep the call's pytree and the provenance inside the file.

    Args:
        capture: the call.
        provenance: the table of tensors.
        held: keys of the scales that the file holds anyway.
        record: how much of the table is kept; see `choose_record`.

    Returns:
        The constants by the names of their methods, and what they keep of the table.
    """
    starts = Counter(map(_start, held))

    def refer(name: str, field: str, values: Sequence[float]) -> str:
        key = scale_key(values) if field == "scale" and len(values) > 1 else ""
        return _start(key) if key in held and starts[_start(key)] == 1 else ""

    def pack(table: Provenance) -> Tensor:
        return _pack(table.to_json(refer))

    kept = choose_record(provenance, record, lambda table: pack(table).numel())
    return {
        CAPTURE_METHOD: _pack(capture.to_json()),
        PROVENANCE_METHOD: pack(kept),
        CHECKSUM_METHOD: _bytes((NO_FIGURES + BLANK).encode("ascii")),
    }, kept


def _start(key: str) -> str:
    return key.removeprefix(_PREFIX)[:_DIGITS]


def _pack(text: str) -> Tensor:
    return _bytes(zlib.compress(text.encode(), 9))


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _unpack(stored: bytes) -> str:
    try:
        return zlib.decompress(stored).decode()
    except (zlib.error, UnicodeDecodeError) as error:
        raise ArtifactError(f"the metadata in this file is damaged: {error}") from error


def unpack_capture(stored: bytes) -> Capture:
    """Read what `pack_metadata` wrote.

    Raises:
        ArtifactError: the bytes are damaged.
        InputError: they describe no call.
    """
    return Capture.from_json(_unpack(stored))


def unpack_provenance(stored: bytes, held: Mapping[str, bytes]) -> Provenance:
    """Read what `pack_metadata` wrote.

    Args:
        stored: the bytes.
        held: the file's named data, which has the delegate's scales.

    Raises:
        ArtifactError: the bytes are damaged, or scales they name are not in the file.
    """
    starts = {_start(key): key for key in held if key.startswith(_PREFIX)}

    def read(name: str, field: str, start: str) -> list[float]:
        found: list[float] = np.frombuffer(held[starts[start]], np.float32).tolist()
        return found

    return Provenance.from_json(_unpack(stored), read)
