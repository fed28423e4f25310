"""Figures of nodes as a file that Google's Model Explorer colours a graph with."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

from pt2e_quant.core.errors import ArtifactError, ConfigError
from pt2e_quant.core.whole_file import whole_file
from pt2e_quant.flow.report.page.plot import SCALE


def write_node_data(
    path: str | Path, values: Mapping[str, float], *, name: str, low_is_bad: bool = True
) -> None:
    """Write the figures of nodes as node data JSON of Model Explorer.

    It is loaded beside a `.pt2`, an `.onnx` or a `.pte`: nodes are found by their names or by the
    names of their results, which are those of the graph and those that Netron shows.

    Args:
        path: of the .json file.
        values: node to figure: decibels, microseconds, bytes. Infinities and NaN are left out.
        name: of the figures, as Model Explorer lists them.
        low_is_bad: low figures are red, as of decibels; otherwise high ones are.

    Raises:
        ConfigError: there is no figure.
        ArtifactError: the path cannot be written.
    """
    finite = {node: value for node, value in values.items() if math.isfinite(value)}
    if not finite:
        raise ConfigError(
            f'"{name}" has no figure of any node', fix="give at least one node and its figure"
        )
    colours = [(at if low_is_bad else 1.0 - at, colour) for at, colour in SCALE]
    data = {
        "name": name,
        "results": {node: {"value": value} for node, value in finite.items()},
        "gradient": [{"stop": at, "bgColor": colour} for at, colour in sorted(colours)],
    }
    try:
        with whole_file(Path(path)) as stream:
            stream.write(json.dumps(data, indent=1).encode())
    except OSError as error:
        raise ArtifactError(
            f'cannot write "{path}": {error.strerror or error}',
            fix="give a path in a folder that exists and can be written",
        ) from error
