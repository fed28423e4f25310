"""The output of `--json`: one object with the name and version of its schema."""

from typing import Any

import typer

from pt2e_quant.core.json_text import json_text

VERSION = 1
"""Of all schemas: it rises when a key changes its meaning or goes; new keys do not raise it."""


def print_json(command: str, data: dict[str, Any]) -> None:
    """Print an object with "schema": "pt2e-quant/<command>/<version>" in front of its keys.

    Numbers that JSON lacks, infinities and NaN, are null.
    """
    typer.echo(as_json(command, data))


def as_json(command: str, data: dict[str, Any]) -> str:
    """The text that `print_json` prints."""
    return json_text({"schema": f"pt2e-quant/{command}/{VERSION}", **data})
