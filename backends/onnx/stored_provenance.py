"""Provenance inside the file, without saying twice what the model's constants say already."""

import base64
import json
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from pt2e_quant.core.errors import ArtifactError
from pt2e_quant.core.provenance import Provenance

_REFERENCE = "constant:"
_SCALE_SUFFIXES = ("_scale", "_scale_column")
"""How the canonical graph names a constant's scales; an embedding's are stored as a column."""


def pack_provenance(provenance: Provenance, constants: Iterable[str]) -> str:
    """As text: compressed, per-channel scales by the name of the constant that holds them.

    Written out, the scales of a small convolutional network take a tenth of its weights' size.
    """
    known = set(constants)
    data = json.loads(provenance.to_json())
    for record in data["tensors"]:
        if len(record["scale"]) < 2:
            continue
        names = [record["name"] + suffix for suffix in _SCALE_SUFFIXES]
        if name := next((n for n in names if n in known), None):
            record["scale"] = _REFERENCE + name
        else:
            # Nine digits say a float32; the seventeen of a Python float only take space.
            record["scale"] = [float(f"{scale:.9g}") for scale in record["scale"]]
        if not any(record["zero_point"]):
            record["zero_point"] = len(record["zero_point"])
    packed = zlib.compress(json.dumps(data, separators=(",", ":")).encode(), level=9)
    return base64.b85encode(packed).decode("ascii")


def unpack_provenance(text: str, read: Callable[[str], list[float]]) -> Provenance:
    """Read what `pack_provenance` wrote; `read` gives a constant's values by its name.

    Raises:
        ArtifactError: the text is damaged.
    """
    try:
        data: Any = json.loads(zlib.decompress(base64.b85decode(text)))
        for record in data["tensors"]:
            if isinstance(record["scale"], str):
                record["scale"] = read(record["scale"].removeprefix(_REFERENCE))
            record["scale"] = np.array(record["scale"], np.float32).tolist()
            if isinstance(record["zero_point"], int):
                record["zero_point"] = [0] * record["zero_point"]
    except (ValueError, TypeError, KeyError, zlib.error) as error:
        raise ArtifactError(f"the provenance in this file is damaged: {error}") from error
    return Provenance.from_json(json.dumps(data))
