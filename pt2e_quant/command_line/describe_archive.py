"""The report of a file that pt2e_quant.save wrote: its own provenance, and what its graph calls."""

from pathlib import Path

from torch.fx import GraphModule

from pt2e_quant.command_line.describe_program import describe_program
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.flow.prepare.prepared import (
    PREPARED_KEY,
    observers_of,
    prepared_graphs,
    prepared_state,
)
from pt2e_quant.flow.report.report import Report

__all__ = ["describe_archive"]


def describe_archive(gm: GraphModule, path: Path) -> Report:
    """What a loaded program is: converted, with its table; or prepared, with its observers.

    Args:
        gm: of `load`.
        path: of the file, for its size.
    """
    report = describe_program(gm)
    table = provenance_of(gm)
    report.size_bytes = sum(p.stat().st_size for p in _files(path))
    if table.sizes:
        report.float_size_bytes = table.float_bytes
    if table.tensors or table.floats:
        report.provenance = table
    if PREPARED_KEY in gm.meta:
        report.backend = "prepared program"
        observers = {id(o): o for g in prepared_graphs(gm) for _, o in observers_of(g)}.values()
        seen = sum(bool(getattr(o, "seen", True)) for o in observers)
        held = sum(len(prepared_state(g).constants) for g in prepared_graphs(gm))
        report.notes = [
            f"{len(observers)} observers, {seen} of them have seen data or need none",
            f"{held} constants are quantized at convert",
        ]
    else:
        report.backend = "converted program"
    return report


def _files(path: Path) -> list[Path]:
    """The file and its shards, which have its name with a digest and a number."""
    return [
        path,
        *path.parent.glob(f"{path.stem}-????????????-[0-9][0-9][0-9][0-9][0-9]{path.suffix}"),
    ]
