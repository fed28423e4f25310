"""Add logs of searches to `benchmarks/results/fuzz.json`: `python -m tests.fuzz.gather LOG...`.

One row for each run of seeds and backend: its seeds, how many models came to which outcome, how
many of the valid ones lowered, and the seeds of those that failed. A run of the same seeds replaces
the earlier one.
"""

import json
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from benchmarks.results import write_results

__all__ = ["gather", "rows_of"]

HARMLESS = ("ok", "float", "refused", "invalid")
KEYS = ("backend", "first_seed", "last_seed")


def rows_of(log: Path) -> list[dict[str, Any]]:
    """The rows of one log, a backend each."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in log.read_text().splitlines():
        row = json.loads(line)
        found[row["backend"]].append(row)
    return [_row(backend, models) for backend, models in sorted(found.items())]


def _row(backend: str, models: list[dict[str, Any]]) -> dict[str, Any]:
    seeds = sorted(m["seed"] for m in models)
    outcomes = Counter(m["outcome"] for m in models)
    valid = len(models) - outcomes["invalid"]
    lowered = outcomes["ok"] + outcomes["float"]
    return {
        "backend": backend,
        "first_seed": seeds[0],
        "last_seed": seeds[-1],
        "models": len(seeds),
        "outcomes": dict(sorted(outcomes.items())),
        "lowered_percent": round(100 * lowered / valid, 1) if valid else None,
        "failed_seeds": sorted(m["seed"] for m in models if m["outcome"] not in HARMLESS),
        "cpu_seconds": round(sum(m.get("seconds", 0.0) for m in models), 1),
        "commit": models[0].get("commit", ""),
    }


def gather(logs: list[Path]) -> Path:
    """Write the rows of logs beside those of earlier runs; returns the file."""
    return write_results("fuzz", [row for log in logs for row in rows_of(log)], keys=KEYS)


if __name__ == "__main__":
    print(gather([Path(name) for name in sys.argv[1:]]))
