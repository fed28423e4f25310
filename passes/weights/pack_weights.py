"""Pack the integers of sub-byte weights and their zero points."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule, Node

from pt2e_quant.core.dtypes import DTYPES, DTypeInfo
from pt2e_quant.core.packing import pack
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.core.qdq import FLOAT_NAME_KEY, QdqKind, float_name, is_dequantize, kind_of_qdq
from pt2e_quant.core.unpack_op import Unpack
from pt2e_quant.graph.alias import mutated_roots, region_operands, subgraph_of
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import attribute, source_constant
from pt2e_quant.graph.ops import arguments
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass

PACKED_SUFFIX = "_packed"
"""The suffix of packed constants, behind the name of the integers."""

_BYTES = (torch.int8, torch.uint8)

_BYTE_RANGE = 128
"""From this many steps on, integers need all 8 bits."""


@graph_pass(needs=(HAS_VALUES,), gives=())
def pack_weights(gm: GraphModule) -> PassResult:
    """Pack each integer constant that only dequantizes of less than 8 bits read.

    Before:  dequantize(weight_q, scale, zero_point, quant_min=-8, quant_max=7, …)
    After:   dequantize(unpack(weight_q_packed, 4, True, …), scale, unpack(zero_point_packed, …), …)

    The width is that of quant_min .. quant_max. Zero points of a scale per group, and of packed
    weights, take the bits of their own values: one each where all are zero. Constants of one
    storage become one. `unpack_weights` is the inverse.
    """
    if not any(_may_pack(node) for node in gm.graph.nodes):
        return PassResult(changed=False)
    editor = Editor(gm)
    written = mutated_roots(gm.graph)
    packer = _Packer(gm, editor)
    for node in [n for n in gm.graph.nodes if n.op == "get_attr" and n not in written]:
        value = attribute(gm, str(node.target))
        if not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex():
            continue
        row = _row_for(node, value)
        if row is not None:
            packer.pack(node, value, row)
    return PassResult(editor.finish(), tuple(packer.notes))


def _may_pack(node: Node) -> bool:
    """True if a node may read a constant to pack: a cheap test before constants are read."""
    kind = kind_of_qdq(node)
    if kind is None:
        return isinstance(node.target, HigherOrderOperator)
    if kind not in (QdqKind.PER_TENSOR, QdqKind.PER_CHANNEL):
        return True
    low, high = node.args[3 + (kind is QdqKind.PER_CHANNEL) :][:2]
    return not isinstance(low, int) or not isinstance(high, int) or high - low < _BYTE_RANGE


class _Packer:
    """Packs constants, each storage once."""

    def __init__(self, gm: GraphModule, editor: Editor) -> None:
        self.gm = gm
        self.editor = editor
        self.made: dict[tuple[object, ...], Node] = {}
        self.notes: list[Note] = []
        # Behind every input, in front of everything that reads a constant.
        self.place = next(n for n in gm.graph.nodes if n.op not in ("get_attr", "placeholder"))
        self.records = {record.name: record for record in provenance_of(gm).tensors}

    def pack(self, node: Node, value: Tensor, row: DTypeInfo) -> None:
        """Put a packed constant and an unpack in the place of a constant."""
        key = value.data_ptr(), tuple(value.shape), value.stride(), value.dtype, row.dtype
        if key not in self.made:
            self.made[key] = self._make(node, value, row)
        self.editor.replace(node, self.made[key])

    def _make(self, node: Node, value: Tensor, row: DTypeInfo) -> Node:
        packed = pack(value.detach(), row.dtype)
        held = self.editor.constant(f"{node.target}{PACKED_SUFFIX}", packed, like=node)
        held.meta[FLOAT_NAME_KEY] = float_name(node)
        dtype: dict[str, Any] = {} if value.dtype == row.storage else {"dtype": value.dtype}
        made = self.editor.call(
            Unpack,
            held,
            row.bits,
            row.signed,
            list(value.shape),
            like=node,
            before=self.place,
            val=node.meta["val"],
            **dtype,
        )
        self._note(node, value.numel() * value.element_size(), packed.numel())
        return made

    def _note(self, node: Node, before: int, after: int) -> None:
        name = str(node.target)
        self.notes.append(Note(node.name, f"{name}: {before} -> {after} bytes"))
        dequantized = (user.args[0] for user in node.users if is_dequantize(user))
        weights = (source_constant(source) for source in dequantized if isinstance(source, Node))
        for weight in {float_name(found) for found in weights if found is not None}:
            record = self.records.get(weight)
            if record is not None and record.size_after:
                record.size_after += after - before


@dataclass(frozen=True, slots=True)
class _Reader:
    """A dequantize that reads a constant.

    Attributes:
        node: the dequantize.
        argument: under which name it reads it.
    """

    node: Node
    argument: str


def _row_for(node: Node, value: Tensor) -> DTypeInfo | None:
    """The integer dtype that a constant can be packed as; None if it stays as it is."""
    readers = list(_readers(node))
    if not readers or None in readers or value.numel() == 0:
        return None
    found = [reader for reader in readers if reader is not None]
    if all(_is_weight(r) for r in found):
        if value.dtype not in _BYTES:
            return None
        row = narrowest(*_range([r.node for r in found], value), value.dtype)
        return row if row is not None and row.is_sub_byte else None
    if all(r.argument == "zero_points" and _packs_zero_points(r.node) for r in found):
        low, high = _extremes(value)
        return narrowest(low, high, torch.uint8 if low >= 0 else torch.int8)
    return None


def narrowest(low: int, high: int, storage: torch.dtype) -> DTypeInfo | None:
    """The dtype of least bits with this storage that holds low .. high, None if none does.

    >>> narrowest(-8, 7, torch.int8).dtype, narrowest(0, 15, torch.uint8).bits
    (torch.int4, 4)
    """
    rows = [r for r in DTYPES.values() if r.storage == storage and r.holds(low, high)]
    return min(rows, key=lambda r: r.bits, default=None)


def _readers(node: Node) -> Iterator[_Reader | None]:
    """The dequantizes that read a value, also inside control flow; None stands for any other."""
    for user in node.users:
        if isinstance(user.target, HigherOrderOperator):
            yield from _readers_inside(node, user)
            continue
        if not is_dequantize(user):
            yield None
            continue
        names = [name for name, value in arguments(user).items() if value is node]
        yield _Reader(user, names[0])


def _readers_inside(node: Node, call: Node) -> Iterator[_Reader | None]:
    for operand in call.args:
        body = subgraph_of(operand) if isinstance(operand, Node) else None
        if body is None:
            continue
        for inner, outer in region_operands(call, body):
            if outer is node:
                yield from _readers(inner)


def _is_weight(reader: _Reader) -> bool:
    return next(iter(arguments(reader.node))) == reader.argument


def _limits(node: Node) -> tuple[int, int] | None:
    """quant_min and quant_max of a dequantize, None if it has none (a code book)."""
    named = arguments(node)
    low, high = named.get("quant_min"), named.get("quant_max")
    return (low, high) if isinstance(low, int) and isinstance(high, int) else None


def _range(nodes: list[Node], value: Tensor) -> tuple[int, int]:
    """The range that dequantizes allow, or that of the integers if one states no range."""
    known = [limits for limits in map(_limits, nodes) if limits is not None]
    if len(known) < len(nodes):
        return _extremes(value)
    return min(low for low, _ in known), max(high for _, high in known)


def _extremes(value: Tensor) -> tuple[int, int]:
    low, high = value.aminmax()
    return int(low), int(high)


def _packs_zero_points(node: Node) -> bool:
    """True if zero points are worth packing: one per group, or those of a sub-byte weight."""
    if not {"group_size", "block_size"}.isdisjoint(arguments(node)):
        return True
    limits = _limits(node)
    if limits is None:
        return False
    row = narrowest(*limits, torch.uint8 if limits[0] >= 0 else torch.int8)
    return row is not None and row.is_sub_byte
