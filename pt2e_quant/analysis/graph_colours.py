"""Graphs coloured by what each operator costs: a picture, and data for Google's Model Explorer."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.fx import GraphModule, Node

from pt2e_quant.backends.artifact import Artifact, ShownNode
from pt2e_quant.core.errors import ArtifactError, ConfigError, module_path, source_line
from pt2e_quant.core.qdq import CHOOSE_QPARAMS_OPS, is_qdq
from pt2e_quant.core.whole_file import whole_file
from pt2e_quant.flow.report.page.plot import COLOURS, SCALE, figure, graph_objects
from pt2e_quant.flow.report.page.section import Section
from pt2e_quant.graph.op_table import operator_name
from pt2e_quant.graph.ops import is_getitem

WORST_DB, BEST_DB = 0.0, 50.0
"""The ends of the colours: no signal left, and more than eight bits give."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """An operator of the picture.

    Args:
        node: its name.
        operator: as "aten.conv2d".
        module: dotted path of its module.
        source: the user's line, "" if not known.
        column: how many operators are before it on the longest way from an input.
        row: its place in the column, 0 in the middle.
        before: the operators that it reads.
    """

    node: str
    operator: str
    module: str
    source: str
    column: int
    row: float
    before: tuple[str, ...]


def places(gm: GraphModule) -> tuple[Place, ...]:
    """Return the place of each operator; q/dq, constants and elements of tuples are left out."""
    shown = [node for node in gm.graph.nodes if _is_shown(node)]
    columns: dict[Node, int] = {}
    before: dict[Node, tuple[Node, ...]] = {}
    members: dict[int, list[Node]] = {}
    for node in shown:
        before[node] = tuple(dict.fromkeys(_read(node)))
        columns[node] = 1 + max((columns[source] for source in before[node]), default=-1)
        members.setdefault(columns[node], []).append(node)
    rows = {
        node: at - (len(column) - 1) / 2
        for column in members.values()
        for at, node in enumerate(column)
    }
    return tuple(
        Place(
            node=node.name,
            operator=operator_name(node) if node.op == "call_function" else "input",
            module=module_path(node),
            source=source_line(node),
            column=columns[node],
            row=rows[node],
            before=tuple(source.name for source in before[node]),
        )
        for node in shown
    )


def _is_shown(node: Node) -> bool:
    if node.op == "placeholder":
        return bool(node.users)
    if node.op != "call_function" or is_qdq(node) or is_getitem(node):
        return False
    return node.target not in CHOOSE_QPARAMS_OPS


def _read(node: Node) -> list[Node]:
    """The shown operators whose results a node reads, through q/dq and elements of tuples."""
    found: list[Node] = []
    waiting = list(node.all_input_nodes)
    met: set[Node] = set()
    while waiting:
        source = waiting.pop(0)
        if source in met:
            continue
        met.add(source)
        if _is_shown(source):
            found.append(source)
        elif source.op == "call_function":
            waiting.extend(source.all_input_nodes)
    return found


def graph_figure(gm: GraphModule, decibels: Mapping[str, float], *, title: str) -> Any:
    """The operators of a graph, coloured by a figure in decibels: a plotly figure.

    Args:
        gm: a float or converted graph.
        decibels: node to SQNR; nodes without one are grey.
        title: of the picture.
    """
    shown = places(gm)
    at = {place.node: (place.column, place.row) for place in shown}
    xs: list[float | None] = []
    ys: list[float | None] = []
    for place in shown:
        for source in place.before:
            way = _way(at[source], at[place.node])
            xs += [*(x for x, _ in way), None]
            ys += [*(y for _, y in way), None]
    plotly = graph_objects()
    edges = plotly.Scatter(
        x=xs, y=ys, mode="lines", line={"color": COLOURS["quiet"], "width": 1}, hoverinfo="skip"
    )
    known = [p for p in shown if _is_number(decibels.get(p.node))]
    other = [p for p in shown if not _is_number(decibels.get(p.node))]
    made = figure([edges, _dots(other, decibels), _dots(known, decibels)], title={"text": title})
    made.update_layout(showlegend=False, dragmode="pan")
    made.update_xaxes(showgrid=False, zeroline=False, showticklabels=False)
    made.update_yaxes(showgrid=False, zeroline=False, showticklabels=False, autorange="reversed")
    return made


def _way(begin: tuple[int, float], end: tuple[int, float]) -> list[tuple[float, float]]:
    """A line between two operators; above the others where it passes some of them."""
    gap = end[0] - begin[0]
    if gap <= 1:
        return [begin, end]
    above = min(begin[1], end[1]) - 0.3 - min(0.05 * gap, 0.6)
    return [begin, (begin[0] + 0.5, above), (end[0] - 0.5, above), end]


def _is_number(value: float | None) -> bool:
    return value is not None and not math.isnan(value) and value != math.inf


def _dots(shown: list[Place], decibels: Mapping[str, float]) -> Any:
    values = [decibels.get(place.node) for place in shown]
    marker: dict[str, Any] = {"size": 13, "line": {"width": 1, "color": COLOURS["quiet"]}}
    if any(_is_number(value) for value in values):
        marker |= {
            "color": [max(WORST_DB, min(BEST_DB, value)) for value in values if value is not None],
            "colorscale": [[stop, colour] for stop, colour in SCALE],
            "cmin": WORST_DB,
            "cmax": BEST_DB,
            "colorbar": {"title": {"text": "dB"}},
        }
    else:
        marker |= {"color": "rgba(150,160,170,0.35)", "size": 8}
    return graph_objects().Scatter(
        x=[place.column for place in shown],
        y=[place.row for place in shown],
        mode="markers",
        marker=marker,
        text=[_hover(p, v) for p, v in zip(shown, values, strict=True)],
        hoverinfo="text",
    )


def _hover(place: Place, value: float | None) -> str:
    shown = f"{value:.1f} dB" if value is not None else "not quantized"
    lines = (f"<b>{place.node}</b> {shown}", place.operator, place.module, place.source)
    return "<br>".join(line for line in lines if line)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPicture:
    """The heat map of a graph as a part of a page.

    Args:
        gm: the graph.
        decibels: node to SQNR.
        text: what the colours say.
    """

    gm: GraphModule
    decibels: Mapping[str, float]
    text: str

    def sections(self) -> list[Section]:
        """The picture."""
        figures = {"graph": self.figure}
        return [Section(title="Where in the graph", text=self.text, figures=figures, rank=20)]

    def figure(self) -> Any:
        """The picture alone: a plotly figure."""
        title = "From inputs (left) to results (right)"
        return graph_figure(self.gm, self.decibels, title=title)


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
