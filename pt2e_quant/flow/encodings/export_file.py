"""Export the qparams of a converted program as JSON."""

import json
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

import torch
from torch.fx import GraphModule, Node

from pt2e_quant.core.dtypes import info
from pt2e_quant.core.errors import ArtifactError, ConfigError, InvariantError, near
from pt2e_quant.core.formats.format_ops import DequantizeBlock
from pt2e_quant.core.provenance import TensorRecord, provenance_of
from pt2e_quant.core.qdq import float_name, is_dequantize, read_qparams
from pt2e_quant.core.qparams import QParams
from pt2e_quant.core.whole_file import whole_file
from pt2e_quant.flow.encodings.aimet import write_dicts, write_lists
from pt2e_quant.flow.encodings.encoding import Encoding
from pt2e_quant.flow.encodings.own import write_own
from pt2e_quant.graph.meta import source_constant
from pt2e_quant.passes.qdq.widen_scales import widened_qparams


class EncodingFormat(StrEnum):
    """The files that qparams are exchanged in."""

    OWN = "pt2e_quant"
    AIMET_DICTS = "aimet-0.6.1"
    AIMET_LISTS = "aimet-1.0.0"


_WRITERS = {
    EncodingFormat.OWN: write_own,
    EncodingFormat.AIMET_DICTS: write_dicts,
    EncodingFormat.AIMET_LISTS: write_lists,
}


def export_encodings(
    quantized: GraphModule, path: str | Path, *, format: str = "pt2e_quant"
) -> tuple[str, ...]:
    """Write the qparams of a converted program as JSON.

    Args:
        quantized: of `convert_pt2e`.
        path: of the file.
        format: "pt2e_quant", "aimet-1.0.0" (lists) or "aimet-0.6.1" (dicts by name).

    Returns:
        The names of quantized tensors that the file does not hold: those with qparams of run
        time, small floats and code books. Scales in other forms than float32 go out as the
        numbers they stand for.

    Raises:
        ConfigError: the format is unknown, or nothing of the program has qparams that it can hold.
        UnsupportedError: the format cannot say what a tensor has.
        ArtifactError: the path cannot be written.
    """
    if format not in list(EncodingFormat):
        raise ConfigError(f'there is no encoding format "{format}"', fix=near(format, _WRITERS))
    records = provenance_of(quantized).tensors
    found = list(_encodings(quantized))
    if not found:
        raise ConfigError(
            "this program has no quantized tensor of integers with constant qparams",
            fix="give the result of convert_pt2e; qparams of run time, small floats and code books "
            "have no encoding",
        )
    text = json.dumps(_WRITERS[EncodingFormat(format)](found), indent=1, allow_nan=False)
    try:
        with whole_file(Path(path)) as stream:
            stream.write(text.encode())
    except OSError as error:
        raise ArtifactError(f"cannot write {path}: {error.strerror}") from error
    written = {encoding.name for encoding in found}
    return tuple(dict.fromkeys(r.name for r in records if r.name not in written))


def _encodings(gm: GraphModule) -> Iterator[Encoding]:
    records: dict[str, TensorRecord] = {}
    for record in provenance_of(gm).tensors:
        records.setdefault(record.name, record)  # its own range, before the one that it shares
    done: set[str] = set()
    for node in gm.graph.nodes:
        source = node.args[0] if is_dequantize(node) else None
        held = source_constant(source) if isinstance(source, Node) else None
        if held is None:
            continue
        name = float_name(held)
        qparams = _constant_qparams(gm, node)
        if qparams is not None and name not in done and not qparams.zero_point.is_floating_point():
            done.add(name)
            yield _of_qparams(name, qparams, records.get(name))
    for name, record in records.items():
        if name not in done and len(record.scale) == 1 and record.dtype in _INTEGERS:
            yield _of_record(record)


def _constant_qparams(gm: GraphModule, node: Node) -> QParams | None:
    """The qparams of a constant's dequantize; None for small floats, code books, other blocks."""
    if node.target is DequantizeBlock:
        return widened_qparams(gm, node)
    try:
        return read_qparams(gm, node)
    except InvariantError:
        return None


_INTEGERS = frozenset(f"{sign}int{bits}" for sign in ("", "u") for bits in (*range(1, 9), 16, 32))


def _of_qparams(name: str, qparams: QParams, record: TensorRecord | None) -> Encoding:
    # The integers may be stored wider than they are used: the range says how many bits they have.
    stored = info(qparams.dtype)
    low, high = qparams.quant_min, qparams.quant_max
    bits = width_of(min(low, -1) if stored.signed else low, high)
    least = -(1 << (bits - 1)) if stored.signed else 0
    zero_point = [int(z) - least for z in qparams.zero_point.reshape(-1).tolist()]
    return Encoding(
        name=name,
        is_param=True,
        bits=bits,
        is_symmetric=all(z == 1 << (bits - 1) for z in zero_point),
        scale=tuple(qparams.scale.reshape(-1).tolist()),
        zero_point=tuple(zero_point),
        quant_min=low - least,
        quant_max=high - least,
        axis=qparams.axis,
        group_size=qparams.group_size,
        steps=() if record is None else tuple(record.steps),
    )


def _of_record(record: TensorRecord) -> Encoding:
    stored = info(getattr(torch, record.dtype))
    zero_point = tuple(int(z) - stored.quant_min for z in record.zero_point)
    return Encoding(
        name=record.name,
        is_param=record.size_before > 0,
        bits=stored.bits,
        is_symmetric=all(z == 1 << (stored.bits - 1) for z in zero_point),
        scale=tuple(record.scale),
        zero_point=zero_point,
        quant_min=record.quant_min - stored.quant_min,
        quant_max=record.quant_max - stored.quant_min,
        steps=tuple(record.steps),
    )


def width_of(quant_min: int, quant_max: int) -> int:
    """Bits of the integers from quant_min to quant_max; two's complement if one is negative."""
    if quant_min < 0:
        return max((-quant_min - 1).bit_length(), quant_max.bit_length()) + 1
    return quant_max.bit_length()
