"""The file of an artifact that is a torch module: the canonical program, its call, its record.

Packed weights are laid out for one machine, and oneDNN's opaque tensors cannot be stored. The file
keeps the integers; whoever loads it packs them for the machine that it is loaded on. What halves
under compression (text, zero points, the example call) is stored so: torch reads both.
"""

import io
import json
import pickle
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.fx import GraphModule

from pt2e_quant.backends.artifact import read_file
from pt2e_quant.core.capture import Capture
from pt2e_quant.core.errors import ArtifactError, Pt2eQuantError
from pt2e_quant.core.provenance import (
    PROVENANCE_KEY,
    Provenance,
    RecordKind,
    choose_record,
    provenance_of,
)
from pt2e_quant.core.read_capture import CAPTURE_KEY, capture_of
from pt2e_quant.flow.archive.held_numbers import read_from, refer_to
from pt2e_quant.flow.reexport import export_again
from pt2e_quant.flow.report.report import Report

_RECORD = "pt2e_quant_{}.json"
_FIGURES = "pt2e_quant_figures.json"
_EXTRA = "archive/extra/"
"""The folder where torch.export keeps extra files."""

_LOOKED_AT = 2**16
"""Bytes of an entry that tell whether it is worth compressing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredProgram:
    """A file's bytes, and the canonical graph in it, with its call and its record.

    Args:
        data: of the file.
        gm: the canonical graph.
        choices: the options that it was lowered with, by name; none is a default.
        kept: what the file keeps of the graph's provenance; None: all that the graph has.
        figures: what the check found: SQNR against the canonical graph, and of that one against
            the float model; None where it is not known.
    """

    data: bytes
    gm: GraphModule
    choices: Mapping[str, bool] = field(default_factory=dict)
    kept: Provenance | None = None
    figures: tuple[float | None, float | None] = (None, None)

    def report(self, backend: str) -> Report:
        """The report of an artifact before it is made; `backend` is the runtime's name."""
        report = Report(
            backend=backend,
            provenance=provenance_of(self.gm),
            size_bytes=len(self.data),
            sqnr_canonical_db=self.figures[0],
            sqnr_float_db=self.figures[1],
        )
        report.note_record(self.kept or report.provenance)
        return report


def write_program(
    gm: GraphModule,
    backend: str,
    choices: Mapping[str, bool] | None = None,
    record: RecordKind | None = None,
) -> StoredProgram:
    """The file of a canonical graph: torch.export's, so that torch.export.load reads it too.

    Args:
        gm: the canonical graph.
        backend: the name of the backend that it was lowered for.
        choices: options that whoever loads it lowers it with again, by name.
        record: how much of the provenance is kept; see `choose_record`.
    """
    capture, refer = capture_of(gm), refer_to(gm)

    def size(table: Provenance) -> int:
        return len(zlib.compress(table.to_json(refer).encode()))

    kept = choose_record(provenance_of(gm), record, size)
    chosen = dict(choices or {})
    text = json.dumps(
        {
            "capture": capture.to_json(),
            "provenance": kept.to_json(refer),
            "choices": chosen,
        }
    )
    stream = io.BytesIO()
    torch.export.save(
        export_again(gm, is_stored=True), stream, extra_files={_RECORD.format(backend): text}
    )
    return StoredProgram(data=_compressed(stream.getvalue()), gm=gm, choices=chosen, kept=kept)


def with_figures(data: bytes, report: Report) -> bytes:
    """A copy of a file with the results of its check, which are known only after it is made."""
    stream = io.BytesIO(data)
    figures = (report.sqnr_canonical_db, report.sqnr_float_db)
    with zipfile.ZipFile(stream, "a") as archive:
        archive.writestr(_EXTRA + _FIGURES, json.dumps(figures))
    return stream.getvalue()


def _compressed(data: bytes) -> bytes:
    """A file whose entries are compressed where that halves them."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as given, zipfile.ZipFile(stream, "w") as made:
        for entry in given.infolist():
            held = given.read(entry)
            start = held[:_LOOKED_AT]
            halves = 2 * len(zlib.compress(start, 1)) < len(start)
            method = zipfile.ZIP_DEFLATED if halves else zipfile.ZIP_STORED
            made.writestr(zipfile.ZipInfo(entry.filename), held, method)
    return stream.getvalue()


def read_program(path: str | Path, backend: str, suffix: str) -> StoredProgram:
    """Read what `write_program` made for a backend, whose files have a suffix.

    Raises:
        ArtifactError: the file is missing, damaged or not one of ours.
    """
    data = read_file(path)
    name = _RECORD.format(backend)
    extra = {name: "", _FIGURES: "[null, null]"}
    try:
        program = torch.export.load(io.BytesIO(data), extra_files=extra)
    except (RuntimeError, ValueError, KeyError, zipfile.BadZipFile, pickle.PickleError) as error:
        raise ArtifactError(
            f'"{path}" is no exported program: {error}', fix=f"give a {suffix} file"
        ) from error
    if not extra[name]:
        raise ArtifactError(
            f'"{path}" holds no record of this package: it was not written by it',
            fix="run it with torch.export.load, or quantize the model again",
        )
    gm = program.module(check_guards=False)
    try:
        texts = json.loads(extra[name])
        records = {
            CAPTURE_KEY: Capture.from_json(texts["capture"]),
            PROVENANCE_KEY: Provenance.from_json(texts["provenance"], read_from(gm)),
        }
        canonical, to_float = json.loads(extra[_FIGURES])
        choices = {str(name): bool(chosen) for name, chosen in texts.get("choices", {}).items()}
    except (ValueError, KeyError, TypeError, AttributeError, Pt2eQuantError) as error:
        raise ArtifactError(f'the record in "{path}" is damaged: {error}') from error
    gm.meta.update(records)
    return StoredProgram(data=data, gm=gm, choices=choices, figures=(canonical, to_float))
