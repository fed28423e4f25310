"""Output of commands: tables, and one object of a named schema for `--json`."""

from collections.abc import Iterable, Mapping
from typing import Any

import typer
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from pt2e_quant.command_line.time_models import Timing
from pt2e_quant.core.json_text import json_text
from pt2e_quant.passes.algorithms.registry import Description

VERSION = 1
"""Version of all schemas: raised when a key changes its meaning or goes, not for new keys."""


def print_json(command: str, data: dict[str, Any]) -> None:
    """Print an object with "schema": "pt2e-quant/<command>/<version>" in front of its keys.

    Numbers that JSON lacks, infinities and NaN, are null.
    """
    typer.echo(as_json(command, data))


def as_json(command: str, data: dict[str, Any]) -> str:
    """The text that `print_json` prints."""
    return json_text({"schema": f"pt2e-quant/{command}/{VERSION}", **data})


def algorithms_table(found: Iterable[Description]) -> Table:
    """A row for each algorithm: its effect, stage, data and paper."""
    table = Table("algorithm", "what it does", "stage", "calibration data", "paper")
    for row in found:
        cells = (row.name, row.what, row.stage, row.data, row.paper)
        table.add_row(*map(escape, cells))
    return table


def recipes_table(backend: str, recipes: Mapping[str, str]) -> Table:
    """A backend's recipes with a line of explanation each."""
    table = Table(title=backend)
    table.add_column("recipe", no_wrap=True)
    table.add_column("what it does", overflow="fold")
    for name, text in recipes.items():
        table.add_row(escape(name), escape(text))
    return table


def results_table(results: Mapping[str, Tensor]) -> Table:
    """Name, shape, type and range of each array."""
    table = Table(title="results")
    for column in ("name", "shape", "dtype", "min", "max", "mean"):
        table.add_column(column, overflow="fold")
    for name, tensor in results.items():
        facts = ["", "", ""]
        if tensor.numel():
            values = tensor.double()
            facts = [f"{float(v):.4g}" for v in (values.min(), values.max(), values.mean())]
        dtype = str(tensor.dtype).removeprefix("torch.")
        table.add_row(name, str(tuple(tensor.shape)), dtype, *facts)
    return table


def timings_table(timings: Mapping[str, Timing], *, threads: int, rounds: int) -> Table:
    """Median and minimum of each file, and how much faster the first one is than each."""
    plural = "" if threads == 1 else "s"
    table = Table(title=f"{rounds} rounds in turn, {threads} thread{plural}")
    table.add_column("file", overflow="fold")
    for column in ("median us", "min us", "speed-up", "MiB"):
        table.add_column(column, justify="right")
    first = next(iter(timings.values()))
    for name, timing in timings.items():
        table.add_row(
            name,
            f"{timing.median_us:,.0f}",
            f"{timing.min_us:,.0f}",
            "" if timing is first else f"{timing.median_us / first.median_us:.2f}x",
            f"{timing.size_bytes / 2**20:.2f}",
        )
    return table
