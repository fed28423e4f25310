"""Benchmark results as JSON with the conditions they were measured under."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "results"
PACKAGES = ("torch", "torchao", "executorch", "onnx", "onnxscript", "onnxruntime", "transformers")
Row = Mapping[str, object]


def conditions() -> dict[str, object]:
    """Return the versions and the machine, as far as they bear on the figures."""
    return {
        "packages": {name: installed_version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
    }


def installed_version(package: str) -> str:
    """Return a package's version, or a word that says it is absent."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def processor_name() -> str:
    """Return the CPU's model name and whether it has VNNI."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return platform.processor()
    text = path.read_text()
    names = [line.split(":")[1].strip() for line in text.splitlines() if "model name" in line]
    vnni = "avx512_vnni" if "avx512_vnni" in text else "no vnni"
    return f"{names[0] if names else platform.machine()}, {vnni}"


def read_rows(name: str) -> list[Row]:
    """Return the rows of `results/<name>.json`; none where there is no such file."""
    path = FOLDER / f"{name}.json"
    rows: list[Row] = json.loads(path.read_text())["rows"] if path.exists() else []
    return rows


def write_results(name: str, rows: Sequence[Row], keys: Sequence[str]) -> Path:
    """Write rows into `results/<name>.json`, replacing those with the same `keys` values.

    Args:
        name: The benchmark's name.
        rows: JSON-ready rows.
        keys: Fields that identify a row, so that a partial run keeps the other rows.

    Returns:
        The path written.
    """
    path = FOLDER / f"{name}.json"
    old = read_rows(name)

    def identity(row: Row) -> str:  # as in the file, where a tuple is a list
        return json.dumps([row[key] for key in keys])

    new = {identity(row) for row in rows}
    kept = [row for row in old if identity(row) not in new]
    FOLDER.mkdir(exist_ok=True)
    # one row a line: a rerun then shows as the lines that changed
    lines = ",\n".join(json.dumps(row) for row in [*kept, *rows])
    stamp = json.dumps(conditions())
    path.write_text(f'{{"conditions": {stamp},\n"rows": [\n{lines}\n]}}\n')
    return path
