"""The size ledger: bytes of every constant of a converted graph, quantized and in float."""

import warnings
import zlib
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.core.errors import Pt2eQuantWarning, UnsupportedError
from pt2e_quant.core.provenance import SizeRecord, provenance_of
from pt2e_quant.core.qdq import float_name, is_dequantize
from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.core.unpack_op import is_unpack, unpacked_dtype
from pt2e_quant.flow.report.report import Report
from pt2e_quant.graph.meta import attribute
from pt2e_quant.graph.subgraphs import bodies

NOTABLE_BYTES = 1 << 16
"""Below this many bytes of float constants a graph or file that does not shrink is noted at most:
the qparams of a few channels may outweigh what they save."""

_NOTABLE_SHARE = 0.1
"""A file must be smaller where its constants are by this share: it holds other things too."""

_ENTRY_BYTES = 1024
"""Bytes that a file may hold per operator and record of the provenance, beside constants."""

_DUPLICATE_BYTES = 256
"""Constants from this size on are compared with each other."""


def constant_bytes(gm: GraphModule) -> int:
    """Bytes of the constants that a graph and its bodies read, each storage once."""
    found: dict[int, int] = {}
    for graph in (gm, *(body.gm for body in bodies(gm))):
        for node in graph.graph.nodes:
            value = attribute(graph, str(node.target)) if node.op == "get_attr" else None
            if isinstance(value, Tensor):
                found[value.data_ptr() or id(value)] = _bytes(value)
    return sum(found.values())


def take_ledger(gm: GraphModule) -> tuple[SizeRecord, ...]:
    """One record for each constant of a converted graph, in graph order.

    The scales and zero points that a weight's dequantize reads count with the weight, as files
    store them: the graph holds an int64 for each zero point, files a byte, and none where all are
    zero. Buffers that a call writes are no duplicates of each other, though all hold zeros at
    first.
    """
    weights: dict[str, _Weight] = {}
    qparams: set[str] = set()
    for node in gm.graph.nodes:
        if is_dequantize(node):
            _note_weight(gm, node, weights, qparams)
    records = [w.record(gm, name) for name, w in weights.items()]
    rest: dict[str, Node] = {}
    for node in gm.graph.nodes:
        name = str(node.target)
        value = attribute(gm, name) if node.op == "get_attr" else None
        if isinstance(value, Tensor) and name not in weights and name not in qparams:
            rest[name] = node
    records += [_plain(gm, name) for name in rest]
    written = set(capture_of(gm).mutated_buffers)
    kept = [(r, t) for r, t in zip(records, [*weights, *rest], strict=True) if t not in written]
    _note_duplicates(gm, [r for r, _ in kept], [t for _, t in kept])
    return tuple(records)


@dataclass(slots=True)
class _Weight:
    """A constant that dequantizes read: the node of its integers, and what comes with them."""

    name: str
    integers: Node
    dtype: str
    float_bytes: int
    with_it: dict[str, int]
    readers: int = 0

    def record(self, gm: GraphModule, target: str) -> SizeRecord:
        value = self.integers.meta["val"]
        stored = attribute(gm, target)
        assert isinstance(stored, Tensor)
        return SizeRecord(
            name=self.name,
            dtype=self.dtype,
            elements=int(value.numel()),
            size_before=self.float_bytes,
            size_after=_bytes(stored),
            qparams=sum(self.with_it.values()),
            readers=self.readers,
        )


def _note_weight(
    gm: GraphModule, node: Node, weights: dict[str, _Weight], qparams: set[str]
) -> None:
    integers = node.args[0]
    source = _constant(integers) if isinstance(integers, Node) else None
    if source is None or not isinstance(integers, Node):
        return  # an activation's, mostly
    others = node.all_input_nodes[1:]
    target = str(source.target)
    if target not in weights:
        value, made = integers.meta["val"], node.meta["val"]
        dtype = unpacked_dtype(integers) if is_unpack(integers) else value.dtype
        size = value.numel() * made.element_size()
        weights[target] = _Weight(
            float_name(source), integers, str(dtype).removeprefix("torch."), size, {}
        )
    weights[target].readers += 1
    for other in others:
        held = _constant(other)
        value = None if held is None else attribute(gm, str(held.target))
        if held is not None and isinstance(value, Tensor):
            qparams.add(str(held.target))
            is_zero_point = other is node.args[2]
            size = _stored_zero_points(value) if is_zero_point else _bytes(value)
            weights[target].with_it[str(held.target)] = size


def _stored_zero_points(value: Tensor) -> int:
    """Bytes that the zero points of a weight take in a file."""
    if not value.any():
        return 0
    return value.numel() if value.dtype is torch.int64 else _bytes(value)


def _constant(node: Node) -> Node | None:
    """The `get_attr` node that a dequantize reads, also through an unpack."""
    if is_unpack(node):
        source = node.args[0]
        node = source if isinstance(source, Node) else node
    return node if node.op == "get_attr" else None


def _plain(gm: GraphModule, name: str) -> SizeRecord:
    value = attribute(gm, name)
    assert isinstance(value, Tensor)
    return SizeRecord(
        name=name,
        dtype=str(value.dtype).removeprefix("torch."),
        elements=value.numel(),
        size_before=_bytes(value),
        size_after=_bytes(value),
    )


def _note_duplicates(gm: GraphModule, records: list[SizeRecord], targets: list[str]) -> None:
    """Note in each record which earlier constant holds the same parameter or the same bytes."""
    first: dict[str, SizeRecord] = {}
    for record in records:
        other = first.setdefault(record.name, record)
        if other is not record:
            record.same_as = f"{other.name} ({other.dtype})"
    alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for at, target in enumerate(targets):
        value = attribute(gm, target)
        if isinstance(value, Tensor) and _bytes(value) >= _DUPLICATE_BYTES:
            alike[value.dtype, tuple(value.shape)].append(at)
    for members in alike.values():
        if len(members) > 1:
            _note_equal(gm, records, targets, members)


def _note_equal(
    gm: GraphModule, records: list[SizeRecord], targets: list[str], members: list[int]
) -> None:
    first: dict[int, int] = {}
    for at in members:
        value = attribute(gm, targets[at])
        assert isinstance(value, Tensor)
        bits: Any = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        other = first.setdefault(zlib.crc32(bits), at)
        held = attribute(gm, targets[other])
        if other != at and isinstance(held, Tensor) and torch.equal(held, value):
            if held.data_ptr() == value.data_ptr():
                records[at].size_after = 0  # two names of one tensor
            else:
                records[at].same_as = records[other].name


def check_smaller(gm: GraphModule, bytes_before: int, *, is_strict: bool) -> None:
    """Refuse a graph whose constants did not shrink although its weights were quantized.

    Below NOTABLE_BYTES of quantized weights in float it is a note of the graph's provenance
    instead: the qparams of small weights may take more than is saved.

    Args:
        gm: a converted graph, its ledger taken.
        bytes_before: `constant_bytes` of the graph in float.
        is_strict: raise; otherwise warn.

    Raises:
        UnsupportedError: naming the constants that grew most.
    """
    records = provenance_of(gm).sizes
    after = sum(r.size_after + r.qparams for r in records)
    quantized = [r for r in records if r.readers]
    if not quantized or after < bytes_before:
        return
    names = {r.name for r in quantized}
    twice = [r.name for r in records if not r.readers and r.name in names]
    worst = sorted(quantized, key=lambda r: r.size_before - r.size_after - r.qparams)[:3]
    listed = "; ".join(
        f"{r.name} {r.size_before:,} -> {r.size_after:,} and {r.qparams:,} of qparams"
        for r in worst
    )
    grew = f"grew from {bytes_before:,} to {after:,} bytes"
    if after == bytes_before:
        grew = f"take {after:,} bytes as before"
    text = f"its weights are quantized, but the graph's constants {grew}: {listed}"
    if twice:
        text += f"; also kept in float: {', '.join(twice[:3])}"
    if sum(r.size_before for r in quantized) < NOTABLE_BYTES:
        provenance_of(gm).notes.append(text)
        return
    error = UnsupportedError(
        text, fix="use larger groups or one scale per channel, or quantize all readers of a weight"
    )
    if is_strict:
        raise error
    warnings.warn(str(error), Pt2eQuantWarning, stacklevel=3)


def check_file_smaller(report: Report, *, is_strict: bool) -> None:
    """Refuse a file that is no smaller than the float constants, though the graph's shrank.

    A backend may store integers wider than the graph has them, or a weight twice. The program
    itself, an unrolled LSTM's say, is not held against the scheme.

    Args:
        report: of an artifact, its size known.
        is_strict: raise; otherwise note it in the report.

    Raises:
        UnsupportedError: with both sizes.
    """
    sizes = report.provenance.sizes
    before = report.provenance.float_bytes
    after = sum(r.size_after + r.qparams for r in sizes)
    shrank = before >= NOTABLE_BYTES and after < before * (1 - _NOTABLE_SHARE)
    operators = sum(report.integer_ops.values()) + sum(report.float_ops.values())
    records = len(report.provenance.tensors) + len(report.provenance.floats)
    stored = report.size_bytes - _ENTRY_BYTES * (operators + records)
    if not shrank or report.size_bytes < before or stored < (before + after) / 2:
        return
    text = (
        f"the {report.backend} file has {report.size_bytes:,} bytes, no less than the float "
        f"constants ({before:,}), though the graph's constants take {after:,}"
    )
    if is_strict:
        raise UnsupportedError(
            text, fix="use a recipe that this backend stores in integers, or strict=False"
        )
    report.notes.append(text)


def _bytes(tensor: Tensor) -> int:
    return int(tensor.numel() * tensor.element_size())
