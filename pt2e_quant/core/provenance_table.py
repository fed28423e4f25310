"""The table of provenance as JSON: columns without what is the default, numbers as bytes.

Half of a table's entries say the same words. Read by columns they compress to less, a column of
defaults takes nothing, and a float32 takes its four bytes instead of up to seventeen digits.
"""

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

import numpy as np

Refer: TypeAlias = Callable[[str, str, Sequence[float]], str]
"""Under which word the file holds the numbers of a tensor's field ("scale") anyway; "": it does
not. Gets the tensor's name, the field, the numbers."""

Read: TypeAlias = Callable[[str, str, str], Sequence[float]]
"""The numbers of a tensor's field, by the word that `Refer` gave for them."""


def held_nowhere(name: str, field: str, values: Sequence[float]) -> str:
    """A `Refer` for files that hold nothing of a table besides."""
    return ""


def read_nowhere(name: str, field: str, word: str) -> Sequence[float]:
    """A `Read` for such files.

    Raises:
        ValueError: always.
    """
    raise ValueError(f'the {field} of "{name}" is not in the file')


_RANGES = ("observed", "read_range")
"""The fields that are (least, greatest) value, or None."""


class NumberWriter:
    """Collects the numbers of a table.

    Args:
        refer: finds what the file holds anyway.
    """

    def __init__(self, refer: Refer) -> None:
        self.refer = refer
        self._numbers: list[float] = []

    def write(self, entry: dict[str, Any]) -> dict[str, Any]:
        """An entry whose lists of numbers are words, counts of collected numbers, or unchanged."""
        name = entry["name"]
        for field in ("scale", "zero_point"):
            word = self.refer(name, field, entry[field])
            entry[field] = word or self._short(entry[field])
        for field in _RANGES:
            if entry[field] is not None:
                entry[field] = self._short(list(entry[field]))
        return entry

    def _short(self, values: list[float]) -> Any:
        """Zeros and float32 numbers as their count, negative for zeros; others as they are."""
        if not any(values):
            return -len(values)
        with np.errstate(over="ignore"):
            if not isinstance(values[0], float) or values != np.array(values, np.float32).tolist():
                return values
        self._numbers += values
        return len(values)

    def text(self) -> str:
        """The collected numbers as text."""
        return base64.b64encode(np.array(self._numbers, np.float32).tobytes()).decode("ascii")


class NumberReader:
    """Reads what a `NumberWriter` wrote, in its order.

    Args:
        text: what it collected.
        read: gives what the file holds anyway.
    """

    def __init__(self, text: str, read: Read) -> None:
        self.read = read
        self._numbers: list[float] = np.frombuffer(base64.b64decode(text), np.float32).tolist()
        self._at = 0

    def with_numbers(self, entry: dict[str, Any]) -> dict[str, Any]:
        """An entry with its numbers."""
        entry["scale"] = self._long(entry, "scale", 0.0)
        entry["zero_point"] = self._long(entry, "zero_point", 0)
        for field in _RANGES:
            if entry[field] is not None:
                low, high = self._long(entry, field, 0.0)
                entry[field] = low, high
        return entry

    def _long(self, entry: dict[str, Any], field: str, zero: float) -> list[Any]:
        value = entry[field]
        if isinstance(value, str):
            return list(self.read(entry["name"], field, value))
        if isinstance(value, list):
            return value
        if value <= 0:
            return [zero] * -value
        self._at += value
        found = self._numbers[self._at - value : self._at]
        if len(found) < value:
            raise ValueError("numbers are missing")
        return found


def to_columns(entries: Sequence[dict[str, Any]], blank: Any) -> dict[str, Any]:
    """Entries as columns; those that are as in a blank record throughout are left out."""
    default = asdict(blank)
    columns = {name: [entry[name] for entry in entries] for name in default}
    kept = {n: v for n, v in columns.items() if any(value != default[n] for value in v)}
    return {"rows": len(entries), **kept}


def from_columns(table: dict[str, Any], blank: Any) -> list[dict[str, Any]]:
    """The entries of what `to_columns` gave.

    Raises:
        ValueError: the columns are not of one length, or others than a record has.
    """
    count, default = table.pop("rows"), asdict(blank)
    if table.keys() - default.keys() or any(len(v) != count for v in table.values()):
        raise ValueError("its columns do not fit")
    return [
        {name: table[name][at] if name in table else _own(value) for name, value in default.items()}
        for at in range(count)
    ]


def _own(value: Any) -> Any:
    """A default that no other entry shares."""
    return list(value) if isinstance(value, list) else value


def to_text(data: Any) -> str:
    """JSON without spaces."""
    return json.dumps(data, separators=(",", ":"))
