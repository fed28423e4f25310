"""This package's own encoding file: the range used, axis, groups and algorithm steps as well."""

from collections.abc import Mapping, Sequence
from typing import Any

from pt2e_quant.core.errors import ArtifactError
from pt2e_quant.flow.encodings.encoding import Encoding

FORMAT = "pt2e_quant.encodings"
VERSION = 1

_FIELDS = ("quant_min", "quant_max", "axis", "group_size")


def write_own(encodings: Sequence[Encoding]) -> dict[str, Any]:
    """The file."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "tensors": [
            {
                "name": e.name,
                "is_param": e.is_param,
                "bits": e.bits,
                "is_symmetric": e.is_symmetric,
                **{field: getattr(e, field) for field in _FIELDS},
                "scale": list(e.scale),
                "zero_point": list(e.zero_point),
                "steps": list(e.steps),
            }
            for e in encodings
        ],
    }


def read_own(data: Mapping[str, Any]) -> list[Encoding]:
    """The tensors of a file.

    Raises:
        ArtifactError: it is of a newer version.
        KeyError, TypeError, ValueError: it is no such file.
    """
    if int(data["version"]) > VERSION:
        raise ArtifactError(
            f"these encodings are of version {data['version']}, expected at most {VERSION}",
            fix="pip install -U pt2e-quant",
        )
    return [
        Encoding(
            name=str(entry["name"]),
            is_param=bool(entry["is_param"]),
            bits=int(entry["bits"]),
            is_symmetric=bool(entry["is_symmetric"]),
            scale=tuple(float(scale) for scale in entry["scale"]),
            zero_point=tuple(int(zero) for zero in entry["zero_point"]),
            steps=tuple(str(step) for step in entry["steps"]),
            quant_min=_integer(entry["quant_min"]),
            quant_max=_integer(entry["quant_max"]),
            axis=_integer(entry["axis"]),
            group_size=_integer(entry["group_size"]),
        )
        for entry in data["tensors"]
    ]


def _integer(value: Any) -> int | None:
    return None if value is None else int(value)
