"""Measured speed of kernels against float by device and shape class, from a benchmark's JSON."""

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import cache
from importlib.resources import files
from typing import Any


class Variant(StrEnum):
    """The output of a kernel, where its speed differs by output."""

    PLAIN = ""
    """Integers, or floats, as the kernel's name says."""
    E4M3 = "e4m3"
    """8-bit floats, by a unit that writes integers too."""
    PIXELS = "pixels"
    """Images of four channels."""


@cache
def read_ratios(package: str, path: str) -> Mapping[str, float]:
    """Class to speed over float, from a JSON file of a package; empty if there is none."""
    return {name: float(ratio) for name, ratio in (_read(package, path) or {}).items()}


@cache
def read_rows(package: str, path: str) -> Sequence[Mapping[str, Any]]:
    """The rows of a JSON file of a package; none if there is none."""
    return tuple(_read(package, path) or ())


def _read(package: str, path: str) -> Any:
    file = files(package).joinpath(path)
    return json.loads(file.read_text()) if file.is_file() else None


def read_measured(op: str, device: str) -> Mapping[str, float]:
    """Shape class to speed over float, from `kernels/<op>/measured/<device>.json`.

    Args:
        op: the unit's folder.
        device: a GPU's name as `tiles.device_slug` writes it.

    Returns:
        Ratios above 1 where the kernel was faster (than what would run instead, where there is no
        float form); empty if it was never measured there.
    """
    return read_ratios("pt2e_quant.kernels", f"{op}/measured/{device}.json")


def measured_class(shape_class: str, variant: Variant = Variant.PLAIN) -> str:
    """The name that ratios of a shape class are kept by.

    Args:
        shape_class: the row of the tile table.
        variant: what was written.

    >>> measured_class("row"), measured_class("row", Variant.E4M3)
    ('row', 'row, e4m3')
    """
    return f"{shape_class}, {variant}" if variant else shape_class


def measured_of(op: str, device: str, variant: Variant = Variant.PLAIN) -> Mapping[str, float]:
    """Shape class to speed over float, of one variant alone; see `read_measured`."""
    rows = read_measured(op, device) if device else {}
    parts = {name: name.partition(", ") for name in rows}
    return {parts[n][0]: ratio for n, ratio in rows.items() if parts[n][2] == variant}
