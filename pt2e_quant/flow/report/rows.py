"""Lines of a report: alike records as one, reasons and types in words."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pt2e_quant.core.provenance import FloatRecord, TensorRecord

_T = TypeVar("_T")
_NUMBER = re.compile(r"(?<=[._])\d+(?=[._]|$)")
"""A number between dots or underscores, as modules of a list and repeated operators have it."""


@dataclass(frozen=True, slots=True)
class FloatLine:
    """Nodes that were left float for one reason.

    Args:
        reason: without the names of backend, op-table entry and operator.
        count: how many.
        operators: "27 mul, 15 add", the most frequent first.
        nodes: names of the first ones.
    """

    reason: str
    count: int
    operators: str
    nodes: str


def float_lines(records: Sequence[FloatRecord], backend: str) -> list[FloatLine]:
    """One line for each reason, the most frequent first."""
    groups: dict[str, list[FloatRecord]] = {}
    for record in records:
        groups.setdefault(_plain_reason(record, backend), []).append(record)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    return [_float_line(reason, members) for reason, members in ordered]


def _float_line(reason: str, members: list[FloatRecord]) -> FloatLine:
    counts = Counter(r.op.removeprefix("aten.").removesuffix("_") for r in members)
    operators = ", ".join(f"{n} {op}" if n > 1 else op for op, n in counts.most_common())
    nodes = ", ".join(r.node for r in members[:4])
    more = f", … ({len(members) - 4} more)" if len(members) > 4 else ""
    return FloatLine(reason, len(members), operators, nodes + more)


def _plain_reason(record: FloatRecord, backend: str) -> str:
    """A reason without what the line's other columns say.

    >>> record = FloatRecord(node="m", op="aten.mul", module="", reason='A mul: its input "y" is')
    >>> _plain_reason(record, "A")
    'its input is'
    """
    text = re.sub(rf"^{re.escape(backend)} \w+(?=:| needs:)", "", record.reason)
    text = re.sub(r"\bits (input|output|weight|bias) \"\w+\"", r"its \1", text.removeprefix(": "))
    operator = record.op.removeprefix("aten.")
    return re.sub(rf"has no int8 {re.escape(operator)} here", "has no int8 form of it", text)


def alike(records: Sequence[_T], key: Callable[[_T], object]) -> Iterator[list[_T]]:
    """Records of one key, in the order of the first of each."""
    groups: dict[object, list[_T]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    yield from groups.values()


def joined_notes(notes: Sequence[str]) -> list[str]:
    """Notes "node: text", those of equal text as one.

    >>> joined_notes(["linear: kept", "done", "linear_1: kept"])
    ['linear, linear_1: kept', 'done']
    """
    found = []
    for group in alike([note.partition(": ") for note in notes], lambda parts: parts[2] or parts):
        names, text = [name for name, _, _ in group], group[0][2]
        shown = ", ".join(names[:4]) + (f", … ({len(names) - 4} more)" if len(names) > 4 else "")
        found.append(f"{shown}: {text}" if text else names[0])
    return found


def shared_name(name: str) -> str:
    """A name with a star for each number in it.

    >>> shared_name("layers.11.fc2.weight"), shared_name("relu_3")
    ('layers.*.fc2.weight', 'relu_*')
    """
    return _NUMBER.sub("*", name)


def choices_of(records: Sequence[TensorRecord]) -> str:
    """Ranges chosen by evidence: of one tensor with the runner-up, of several their number.

    >>> from pt2e_quant.core.schemes import Role
    >>> record = TensorRecord(name="x", role=Role.INPUT, evidence="99.9 %; runner-up …")
    >>> choices_of([record])
    '99.9 %; runner-up …'
    >>> choices_of([record, record])
    '2 x 99.9 %'
    """
    found = [record.evidence for record in records if record.evidence]
    if len(found) < 2:
        return "".join(found)
    counted = Counter(re.split("[;:]", text)[0] for text in found)
    return ", ".join(f"{count} x {name}" for name, count in counted.most_common())


def kind_of(record: TensorRecord) -> str:
    """The type of a quantized tensor: "int8[-127,127] axis 0", "int8 at run time"."""
    blocks = f" in blocks of {record.block}" if record.block else ""
    if record.is_dynamic or record.quant_min == record.quant_max:  # ranges of run time are not kept
        return f"{record.dtype} at run time{blocks}"
    kind = f"{record.dtype}[{record.quant_min},{record.quant_max}]{blocks}"
    if record.axis is not None:
        kind += f" axis {record.axis}"
    if record.group_size is not None:
        kind += f" groups of {record.group_size}"
    return kind
