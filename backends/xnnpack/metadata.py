"""What the file says of itself: the call's pytree and the provenance, as bytes in the program.

Per-channel scales are not said twice. The delegate keeps its scales in the file under a hash of
their bytes, so a record names that hash; written out, the scales of MobileNetV2 take 1.2 % of the
float model.
"""

import base64
import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule

from pt2e_quant.core.capture import Capture
from pt2e_quant.core.checksum import BLANK
from pt2e_quant.core.errors import ArtifactError
from pt2e_quant.core.provenance import Provenance
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
_HELD, _WRITTEN = "held", "float32"


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
    capture: Capture, provenance: Provenance, held: Iterable[str]
) -> dict[str, Tensor]:
    """The constant methods that keep the call's pytree and the provenance inside the file.

    Args:
        capture: the call.
        provenance: the table of tensors.
        held: keys of the scales that the file holds anyway.
    """
    known = set(held)
    data = json.loads(provenance.to_json())
    for record in data["tensors"]:
        scales, zero_points = record["scale"], record["zero_point"]
        if len(scales) > 1:
            key = scale_key(scales)
            raw = base64.b64encode(np.asarray(scales, np.float32).tobytes()).decode("ascii")
            record["scale"] = {_HELD: key} if key in known else {_WRITTEN: raw}
        if len(zero_points) > 1 and not any(zero_points):
            record["zero_point"] = len(zero_points)
    texts = {
        CAPTURE_METHOD: capture.to_json(),
        PROVENANCE_METHOD: json.dumps(data, separators=(",", ":")),
    }
    packed = {name: _pack(text) for name, text in texts.items()}
    return {**packed, CHECKSUM_METHOD: _bytes((NO_FIGURES + BLANK).encode("ascii"))}


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
    text = _unpack(stored)
    try:
        data = json.loads(text)
        for record in data["tensors"]:
            if isinstance(record["scale"], dict):
                record["scale"] = _scales(record["scale"], held)
            if isinstance(record["zero_point"], int):
                record["zero_point"] = [0] * record["zero_point"]
    except (ValueError, TypeError, KeyError) as error:
        raise ArtifactError(f"the provenance in this file is damaged: {error}") from error
    return Provenance.from_json(json.dumps(data))


def _scales(reference: Mapping[str, str], held: Mapping[str, bytes]) -> list[float]:
    raw = held[reference[_HELD]] if _HELD in reference else base64.b64decode(reference[_WRITTEN])
    found: list[float] = np.frombuffer(raw, np.float32).tolist()
    return found
