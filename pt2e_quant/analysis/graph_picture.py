"""A graph as a picture: its operators from left to right, coloured by what each one costs."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from pt2e_quant.core.errors import module_path, source_line
from pt2e_quant.core.qdq import CHOOSE_QPARAMS_OPS, is_qdq
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
    """Where each operator stands; q/dq, constants and elements of tuples are left out."""
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
