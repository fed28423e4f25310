"""Figures of nodes as a file that Google's Model Explorer colours a graph with."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

from pt2e_quant.backends.artifact import Artifact
from pt2e_quant.core.errors import ArtifactError, ConfigError, UnsupportedError
from pt2e_quant.core.whole_file import whole_file
from pt2e_quant.flow.report.page.plot import SCALE


def write_node_data(
    path: str | Path,
    values: Mapping[str, float],
    *,
    name: str,
    low_is_bad: bool = True,
    artifact: Artifact | None = None,
) -> None:
    """Write the figures of nodes as node data JSON of Model Explorer.

    It is loaded beside a `.pt2`, whose node ids are the names of the graph, or, where `artifact` is
    given, beside its `.onnx`, whose node ids are the names of ONNX nodes. The adapter for `.pte`
    numbers instructions and has no names.

    Args:
        path: of the .json file.
        values: node to figure: decibels, microseconds, bytes. Infinities and NaN are left out.
        name: of the figures, as Model Explorer lists them.
        low_is_bad: low figures are red, as of decibels; otherwise high ones are.
        artifact: the one whose file the figures are shown on; None for a `.pt2`.

    Raises:
        ConfigError: there is no figure, or none of a node of the file.
        UnsupportedError: Model Explorer has no names for operators in files of the artifact.
        ArtifactError: the path cannot be written.
    """
    if artifact is not None:
        values = _by_id(values, artifact)
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


def _by_id(values: Mapping[str, float], artifact: Artifact) -> dict[str, float]:
    """The figures by the ids of the nodes of an artifact's file."""
    ids = artifact.node_ids()
    if ids is None:
        raise UnsupportedError(
            "Model Explorer has no names for the operators in files of this backend",
            fix="leave out artifact=…, and load the figures beside the program's .pt2",
        )
    return {ids[node]: value for node, value in values.items() if node in ids}
