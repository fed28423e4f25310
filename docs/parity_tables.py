"""The tables of docs/integer_reference.md: forms, runtimes against exact integers, models."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.parity import REASONS
from pt2e_quant.graph.ops import Overload
from pt2e_quant.passes.reference.forms.functions import TABLE
from pt2e_quant.passes.reference.forms.registry import FORMS, WITHOUT_FORM

__all__ = ["forms_table", "parity_tables"]

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


def forms_table() -> str:
    """The operators of each integer form, and those of op tables that have none."""
    lines = ["| form | operators |", "| --- | --- |"]
    for form in FORMS:
        if form is TABLE:
            lines.append("| table | every other pointwise function of one tensor and of numbers |")
            continue
        targets = (m.target if isinstance(m, Overload) else m for m in form.operators)
        lines.append(f"| {form.name} | {_names(targets)} |")
    lines += ["", "Without a form:", "", "| operators | why |", "| --- | --- |"]
    for reason in dict.fromkeys(WITHOUT_FORM.values()):
        targets = (target for target, why in WITHOUT_FORM.items() if why == reason)
        lines.append(f"| {_names(targets)} | {reason} |")
    return "\n".join(lines)


def _names(targets: Iterable[Any]) -> str:
    """The operators by name, the forms of one in place and of one with other arguments once."""
    found = dict.fromkeys(target._schema.name.replace("::", ".") for target in targets)
    return ", ".join(
        f"`{name}`" for name in found if name.removesuffix("_") not in {*found} - {name}
    )


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
    for row in (row for row in rows if "default" not in row):
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
    lines += [
        "",
        "Artifacts of each backend's own `int8` quantizer, lowered without options. An operator in "
        "float may round a value near a tie to the next integer: the integers behind it are "
        "compared from the artifact's own results of it, too (`integers` of `verify_parity`):",
        "",
        "| model | equal on XNNPACK | in float | integers alone | equal on ONNX Runtime | in float "
        "| integers alone |",
        "| --- " * 7 + "|",
    ]
    defaults = [row for row in rows if "default" in row]
    for row in defaults:
        found = [row["default"][name] for name in ("xnnpack", "onnx")]
        cells = [
            text
            for f in found
            for text in (
                _share({**f, "float": 0}),
                str(f["float"]),
                _share({**f["integers"], "float": 0}) if "integers" in f else "the same",
            )
        ]
        lines.append(f"| {row['model']} | " + " | ".join(cells) + " |")
    return lines + _of_floats(rows)


def _of_floats(rows: Sequence[Row]) -> list[str]:
    """Which operators in float give other integers than the reference's, from the same ones."""
    lines = []
    for row in rows:
        for name, found in row.get("default", row.get("parity", {})).items():
            apart = [
                f"`{node}` ({o['operator']}) {100 * o['share_differing']:.2g} % by {o['steps']:g}"
                for node, o in found.get("of_floats", {}).items()
            ]
            if apart:
                lines.append(f"- {row['model']} on {RUNTIMES[name]}: {', '.join(apart)}.")
    if not lines:
        return []
    told = "Operators in float whose results are other integers, at the same integers before them:"
    return ["", told, "", *lines]


def _share(found: Row) -> str:
    share = f"{100 * found['share_equal']:.2f} %"
    steps = "" if found["share_equal"] == 1 else f", within {found['steps']:g}"
    return f"{share}{steps}{' (partly float)' if found['float'] else ''}"
