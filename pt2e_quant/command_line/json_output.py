"""The output of `--json`: one object with the name and version of its schema."""

import json
import math
from typing import Any

import typer

VERSION = 1
"""Of all schemas: it rises when a key changes its meaning or goes; new keys do not raise it."""


def print_json(command: str, data: dict[str, Any]) -> None:
    """Print an object with "schema": "pt2e-quant/<command>/<version>" in front of its keys.

    Numbers that JSON lacks, infinities and NaN, are null.
    """
    typer.echo(as_json(command, data))


def as_json(command: str, data: dict[str, Any]) -> str:
    """The text that `print_json` prints."""
    found = {"schema": f"pt2e-quant/{command}/{VERSION}", **data}
    return json.dumps(_finite(found), indent=1, default=dict)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value
