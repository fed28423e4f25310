"""Figures of nodes as a file that Google's Model Explorer colours a graph with."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

from pt2e_quant.backends.artifact import Artifact, ShownNode
from pt2e_quant.core.errors import ArtifactError, ConfigError
from pt2e_quant.core.whole_file import whole_file
from pt2e_quant.flow.report.page.plot import SCALE


def write_node_data(
    path: str | Path,
    values: Mapping[str, float],
    *,
    name: str,
    low_is_bad: bool = True,
    artifact: Artifact | None = None,
    file: str | Path = "",
) -> None:
    """Write the figures of nodes as node data JSON of Model Explorer.

    It is loaded beside a `.pt2`, whose node ids are the names of the graph, or, where `artifact` is
    given, beside its `.onnx`, whose node ids are the names of ONNX nodes, or its `.pte`, whose
    delegates are graphs of numbered nodes.

    Args:
        path: of the .json file.
        values: node to figure: decibels, microseconds, bytes. Infinities and NaN are left out. Of
            values that one node of the file makes, a convolution's and its relu's, the worst stays.
        name: of the figures, as Model Explorer lists them.
        low_is_bad: low figures are red, as of decibels; otherwise high ones are.
        artifact: the one whose file the figures are shown on; None for a `.pt2`.
        file: where the artifact was saved; needed of a `.pte`, whose graphs are named by it.

    Raises:
        ConfigError: there is no figure, none of a node of the file, or no name of a `.pte`.
        UnsupportedError: the nodes of the artifact's file are not known to Model Explorer or here.
        ArtifactError: the path cannot be written.
    """
    finite = {node: value for node, value in values.items() if math.isfinite(value)}
    shown = {node: ShownNode(node=node) for node in finite}
    if artifact is not None:
        shown = dict(artifact.node_ids(Path(file).name))
    worse = min if low_is_bad else max
    graphs: dict[str, dict[str, float]] = {}
    for node, value in finite.items():
        if (place := shown.get(node)) is not None:
            figures = graphs.setdefault(place.graph, {})
            figures[place.node] = worse(value, figures.get(place.node, value))
    if not graphs:
        raise ConfigError(
            f'"{name}" has no figure of any node', fix="give at least one node and its figure"
        )
    colours = [(at if low_is_bad else 1.0 - at, colour) for at, colour in SCALE]
    gradient = [{"stop": at, "bgColor": colour} for at, colour in sorted(colours)]
    found = {
        graph: {
            "name": name,
            "results": {node: {"value": value} for node, value in figures.items()},
            "gradient": gradient,
        }
        for graph, figures in graphs.items()
    }
    data = found.get("", found)
    try:
        with whole_file(Path(path)) as stream:
            stream.write(json.dumps(data, indent=1).encode())
    except OSError as error:
        raise ArtifactError(
            f'cannot write "{path}": {error.strerror or error}',
            fix="give a path in a folder that exists and can be written",
        ) from error
