"""The static facts that kernels are held to: `benchmarks/kernels/sass/<op>/triton_3_7_1.json`."""

import json
from collections.abc import Mapping
from pathlib import Path

from benchmarks.kernels.ahead_of_time.facts import KernelFacts

__all__ = ["BASELINES", "baseline_file", "read_baseline", "row_name", "write_baseline"]

BASELINES = Path(__file__).parents[1] / "sass"


def baseline_file(op: str, version: str) -> Path:
    """Of a unit and a Triton version."""
    return BASELINES / op / f"triton_{version.replace('.', '_')}.json"


def row_name(case_name: str, table: str, capability: int) -> str:
    """The key of a case with the tiles of a table on a generation."""
    return f"{case_name} @ {table} sm_{capability}"


def read_baseline(op: str, version: str) -> dict[str, KernelFacts]:
    """Row name to facts; empty if the unit was never compiled with that version."""
    file = baseline_file(op, version)
    if not file.is_file():
        return {}
    return {n: KernelFacts.from_json(row) for n, row in json.loads(file.read_text()).items()}


def write_baseline(op: str, version: str, facts: Mapping[str, KernelFacts]) -> Path:
    """Replace a unit's baseline; one row a line, so that a change shows as the rows it changed."""
    file = baseline_file(op, version)
    file.parent.mkdir(exist_ok=True, parents=True)
    rows = (f"{json.dumps(n)}: {json.dumps(facts[n].to_json())}" for n in sorted(facts))
    file.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    return file
