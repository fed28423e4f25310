"""Store constants once that both the delegate and ExecuTorch's own operators read.

The delegate keeps its weights in segments that it finds by name, all other operators read theirs
from one constant segment, and ExecuTorch has no way to name one tensor in both: a table that an
embedding looks up and a head multiplies with is written twice. A segment, though, is no more than
an offset and a size, and the runtime loads each for itself. So a named segment whose bytes stand in
the constant segment too is pointed at those, and its own bytes are left out. What the runtime
loads, and how it computes, stays the same.

Offsets are read and set as flatbuffers lays them out; the order of a table's fields is part of
ExecuTorch's file format (`schema/program.fbs`).
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from pt2e_quant.accelerate.patch import Patch

PATCH = Patch(
    name="share_constants",
    saves="the second copy of tables that the delegate and ExecuTorch's own operators both read",
    versions={"executorch": "1.4"},
)

_SEGMENTS, _CONSTANT_SEGMENT, _NAMED_DATA = 4, 5, 7
"""Fields of table Program."""
_INDEX, _OFFSETS = 0, 1
"""Fields of table SubsegmentOffsets."""
_NAMED_INDEX = 1
"""Field of table NamedData: which segment it is."""
_OFFSET, _SIZE = 0, 1
"""Fields of table DataSegment."""

_MAGIC, _MAGIC_AT = b"eh00", 8
_BASE_AT, _DATA_SIZE_AT = 24, 32
"""Place in the extended header of the start of all segments, and of their size."""

_ALIGNMENT = 128
"""Of segments, as ExecuTorch writes them; a multiple of what the delegate asks for, 16."""
_NOTABLE = 256
"""Bytes from which on sharing is worth it."""


@dataclass(slots=True)
class _Segment:
    """A part of the file behind the program.

    Attributes:
        at: where the file says its offset; 0 where it does not, for an offset of 0.
        offset: from the start of all segments.
        size: in bytes.
    """

    at: int
    offset: int
    size: int


def share_constants(pte: bytes) -> bytes:
    """A program with the same contents in fewer bytes; the same bytes if nothing is shared."""
    if not PATCH.is_on() or pte[_MAGIC_AT : _MAGIC_AT + len(_MAGIC)] != _MAGIC:
        return pte  # or: everything is inside the flatbuffer, there are no segments
    reader = _Reader(pte)
    base = reader.number(_BASE_AT, "<Q")
    segments = reader.segments()
    shared = dict(_find_shared(pte, reader, segments, base))
    if not shared:
        return pte
    head, parts = bytearray(pte[:base]), bytearray()
    moved: dict[int, int] = {}
    for index in sorted(range(len(segments)), key=lambda i: segments[i].offset):
        segment = segments[index]
        if index in shared:
            continue
        parts += bytes(-len(parts) % _ALIGNMENT)
        moved[index] = len(parts)
        parts += pte[base + segment.offset : base + segment.offset + segment.size]
    for index, (holder, within) in shared.items():
        moved[index] = moved[holder] + within
    for index, offset in moved.items():
        if segments[index].at:
            struct.pack_into("<Q", head, segments[index].at, offset)
    struct.pack_into("<Q", head, _DATA_SIZE_AT, len(parts))
    return bytes(head + parts)


def _find_shared(
    pte: bytes, reader: "_Reader", segments: list[_Segment], base: int
) -> Iterator[tuple[int, tuple[int, int]]]:
    """Named segments whose bytes stand in the constant segment: their index, that one's, where."""
    constants = reader.table(reader.root, _CONSTANT_SEGMENT)
    if not constants:
        return
    holder = reader.scalar(constants, _INDEX, "<I")
    starts = list(reader.numbers(constants, _OFFSETS))
    first = base + segments[holder].offset
    for index in dict.fromkeys(reader.named()):
        segment = segments[index]
        if index == holder or segment.size < _NOTABLE or not segment.at:
            continue
        begin = base + segment.offset
        for start in starts:
            end = start + segment.size
            if end > segments[holder].size or pte[first + start] != pte[begin]:
                continue
            if pte[first + start : first + end] == pte[begin : begin + segment.size]:
                yield index, (holder, start)
                break


class _Reader:
    """Reads the few tables of a program that say where its segments are."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.root = self.number(0, "<I")

    def number(self, at: int, form: str) -> int:
        """The number at a place."""
        found: int = struct.unpack_from(form, self.data, at)[0]
        return found

    def field(self, table: int, index: int) -> int:
        """Return the place of a table's field, 0 if the table leaves it out."""
        layout = table - self.number(table, "<i")
        slot = 4 + 2 * index
        within = self.number(layout + slot, "<H") if slot < self.number(layout, "<H") else 0
        return table + within if within else 0

    def scalar(self, table: int, index: int, form: str) -> int:
        """A number of a table; those left out are 0."""
        at = self.field(table, index)
        return self.number(at, form) if at else 0

    def table(self, table: int, index: int) -> int:
        """The table, or vector, that a field refers to; 0 for none."""
        at = self.field(table, index)
        return at + self.number(at, "<I") if at else 0

    def tables(self, table: int, index: int) -> Iterator[int]:
        """The tables of a vector."""
        vector = self.table(table, index)
        for place in range(self.number(vector, "<I") if vector else 0):
            at = vector + 4 + 4 * place
            yield at + self.number(at, "<I")

    def numbers(self, table: int, index: int) -> Iterator[int]:
        """The 64-bit numbers of a vector."""
        vector = self.table(table, index)
        for place in range(self.number(vector, "<I") if vector else 0):
            yield self.number(vector + 4 + 8 * place, "<Q")

    def segments(self) -> list[_Segment]:
        """All segments, by index."""
        return [
            _Segment(
                self.field(table, _OFFSET),
                self.scalar(table, _OFFSET, "<Q"),
                self.scalar(table, _SIZE, "<Q"),
            )
            for table in self.tables(self.root, _SEGMENTS)
        ]

    def named(self) -> Iterator[int]:
        """The segments that a delegate finds by name."""
        for table in self.tables(self.root, _NAMED_DATA):
            yield self.scalar(table, _NAMED_INDEX, "<I")
