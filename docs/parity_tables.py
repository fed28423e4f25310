"""The tables of docs/integer_reference.md: runtimes against exact integers, and whole models."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.parity import REASONS

__all__ = ["parity_tables"]

RUNTIMES = {
    "xnnpack": "XNNPACK",
    "onnx": "ONNX Runtime",
    "cpu": "oneDNN",
    "cuda": "Triton kernels",
    "qdq": "q/dq graph",
}
Row = Mapping[str, Any]


def parity_tables(folder: Path) -> str:
    """Both tables, with what explains each value that is not 0."""
    operators: list[Row] = json.loads((folder / "parity.json").read_text())["rows"]
    models: list[Row] = json.loads((folder / "integer_models.json").read_text())["rows"]
    return "\n".join([*_operators(operators), "", *_models(models)])


def _operators(rows: Sequence[Row]) -> list[str]:
    found = {(row["operator"], row["runtime"]): row for row in rows}
    names = dict.fromkeys(row["operator"] for row in rows)
    lines = [
        "| operator | cases | " + " | ".join(RUNTIMES.values()) + " |",
        "| --- " * (2 + len(RUNTIMES)) + "|",
    ]
    for name in names:
        cells = [_cell(found[name, runtime]) for runtime in RUNTIMES]
        lines.append(f"| {name} | {found[name, 'qdq']['cases']:,} | " + " | ".join(cells) + " |")
    lines += ["", "Where it is not 0:", ""]
    for row in rows:
        if row["runtime"] != "qdq" and row["differ"]:
            reason = REASONS[row["operator"], row["runtime"]]
            lines.append(f"- {row['operator']} on {RUNTIMES[row['runtime']]}: {reason}.")
    lines.append("- the q/dq graph adds biases that are no whole steps of the accumulator.")
    return lines


def _cell(row: Row) -> str:
    note = ", float" if row["float"] else ""
    if not row["differ"]:
        return f"0{note}"
    return f"{row['differ']:,} by {row['steps']}{note}"


def _models(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| model | operators in integers | in float | q/dq, integers (SQNR) | time over float | "
        "equal on XNNPACK | equal on ONNX Runtime |",
        "| --- " * 7 + "|",
    ]
    for row in rows:
        parity = row.get("parity", {})
        shares = [_share(parity[b]) if b in parity else "" for b in ("xnnpack", "onnx")]
        cells = [
            row["model"],
            str(row["integer_operators"]),
            ", ".join(f"`{name}`" for name in row["float_operators"]) or "none",
            f"{row['qdq_db']:.1f} dB, {row['integer_db']:.1f} dB",
            f"{row['ratio']:.2f}x",
            *shares,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _share(found: Row) -> str:
    share = f"{100 * found['share_equal']:.2f} %"
    steps = "" if found["share_equal"] == 1 else f", within {found['steps']:g}"
    return f"{share}{steps}{' (partly float)' if found['float'] else ''}"
