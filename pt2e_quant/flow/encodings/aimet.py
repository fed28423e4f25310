"""AIMET's encoding files: version 0.6.1 (and those before it), dicts by name; 1.0.0, lists.

As AIMET's "Encoding Format Specification" has it, an integer x from 0 to 2 ** bits - 1 stands for
(x + offset) * scale. So offset is minus our zero point counted from the least integer; a symmetric
tensor's is minus the middle, -128 at 8 bits. Some writers give 0 there: read as the middle too.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pt2e_quant.core.errors import ArtifactError, UnsupportedError
from pt2e_quant.flow.encodings.encoding import Encoding

_SECTIONS = {"activation_encodings": False, "param_encodings": True}


def write_dicts(encodings: Sequence[Encoding]) -> dict[str, Any]:
    """The file of version 0.6.1.

    Raises:
        UnsupportedError: a tensor has a scale per group.
    """
    found: dict[str, Any] = {"version": "0.6.1"} | {section: {} for section in _SECTIONS}
    for encoding in encodings:
        if encoding.group_size is not None:
            raise UnsupportedError(
                f'encodings of version 0.6.1 have no groups, "{encoding.name}" has groups of '
                f"{encoding.group_size}",
                fix='format="aimet-1.0.0"',
            )
        section = "param_encodings" if encoding.is_param else "activation_encodings"
        found[section][encoding.name] = [
            _dict_of(encoding, scale, zero)
            for scale, zero in zip(encoding.scale, encoding.zero_point, strict=True)
        ]
    return found


def _dict_of(encoding: Encoding, scale: float, zero_point: int) -> dict[str, Any]:
    least = 0 if encoding.quant_min is None else encoding.quant_min
    greatest = (1 << encoding.bits) - 1 if encoding.quant_max is None else encoding.quant_max
    return {
        "bitwidth": encoding.bits,
        "dtype": "int",
        "is_symmetric": str(encoding.is_symmetric),
        "max": (greatest - zero_point) * scale,
        "min": (least - zero_point) * scale,
        "offset": -zero_point,
        "scale": scale,
    }


def write_lists(encodings: Sequence[Encoding]) -> dict[str, Any]:
    """The file of version 1.0.0."""
    found: dict[str, Any] = {"version": "1.0.0"} | {section: [] for section in _SECTIONS}
    for encoding in encodings:
        kind = "PER_TENSOR" if len(encoding.scale) == 1 else "PER_CHANNEL"
        entry = {
            "name": encoding.name,
            "enc_type": kind if encoding.group_size is None else "PER_BLOCK",
            "dtype": "INT",
            "bw": encoding.bits,
            "is_sym": encoding.is_symmetric,
            "scale": list(encoding.scale),
            "offset": [-zero for zero in encoding.zero_point],
        }
        if encoding.group_size is not None:
            entry["block_size"] = encoding.group_size
        section = "param_encodings" if encoding.is_param else "activation_encodings"
        found[section].append(entry)
    return found | {"excluded_layers": [], "producer": "pt2e_quant"}


def read_dicts(data: Mapping[str, Any]) -> list[Encoding]:
    """The tensors of a file of version 0.6.1 or less.

    Raises:
        ArtifactError, KeyError, TypeError, ValueError: it is no such file.
    """
    found = []
    for section, is_param in _SECTIONS.items():
        for name, entries in data.get(section, {}).items():
            # AIMET for PyTorch writes the inputs and outputs of modules by position.
            if isinstance(entries, Mapping):
                raise ArtifactError(
                    f'"{name}" has encodings by the inputs and outputs of a module',
                    fix="give the file that is written beside the .onnx, which names tensors",
                )
            found.append(_of_dicts(str(name), entries, is_param))
    return found


def _of_dicts(name: str, entries: Sequence[Mapping[str, Any]], is_param: bool) -> Encoding:
    first = entries[0]
    bits, is_symmetric = int(first["bitwidth"]), str(first.get("is_symmetric")) == "True"
    if first.get("dtype", "int") != "int":
        return _float(name, is_param, bits)
    return Encoding(
        name=name,
        is_param=is_param,
        bits=bits,
        is_symmetric=is_symmetric,
        scale=tuple(float(entry["scale"]) for entry in entries),
        zero_point=tuple(
            _zero_point(entry["offset"], bits, is_symmetric, name) for entry in entries
        ),
    )


def read_lists(data: Mapping[str, Any]) -> list[Encoding]:
    """The tensors of a file of version 1.0.0.

    Raises:
        ArtifactError, KeyError, TypeError, ValueError: it is no such file.
    """
    return [
        _of_entry(entry, is_param)
        for section, is_param in _SECTIONS.items()
        for entry in data.get(section, ())
    ]


def _of_entry(entry: Mapping[str, Any], is_param: bool) -> Encoding:
    name, bits, is_symmetric = (
        str(entry["name"]),
        int(entry["bw"]),
        bool(entry.get("is_sym", False)),
    )
    if str(entry.get("dtype", "INT")).upper() != "INT":
        return _float(name, is_param, bits)
    kind = str(entry.get("enc_type", "PER_TENSOR"))
    if kind not in ("PER_TENSOR", "PER_CHANNEL", "PER_BLOCK"):
        raise ArtifactError(f'"{name}" is encoded {kind}, which has no integers of its own here')
    return Encoding(
        name=name,
        is_param=is_param,
        bits=bits,
        is_symmetric=is_symmetric,
        scale=tuple(float(scale) for scale in entry["scale"]),
        zero_point=tuple(_zero_point(v, bits, is_symmetric, name) for v in entry["offset"]),
        group_size=int(entry["block_size"]) if kind == "PER_BLOCK" else None,
    )


def _float(name: str, is_param: bool, bits: int) -> Encoding:
    return Encoding(name=name, is_param=is_param, bits=bits, is_symmetric=False, is_float=True)


def _zero_point(offset: Any, bits: int, is_symmetric: bool, name: str) -> int:
    if float(offset) != int(offset):
        raise ArtifactError(f'the offset {offset} of "{name}" is no integer')
    middle = 1 << (bits - 1)
    # 0, or one off where the least integer is left out: zero is the middle all the same.
    if is_symmetric and -int(offset) in (0, middle - 1, middle):
        return middle
    return -int(offset)
