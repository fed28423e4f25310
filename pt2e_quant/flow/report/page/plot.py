"""Plotly, imported when a picture is asked for, and what all pictures of this package share."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from pt2e_quant.core.errors import MissingExtraError
from pt2e_quant.core.provenance import SizeRecord

COLOURS = {
    "good": "#2a9d8f",
    "middling": "#e9c46a",
    "bad": "#d1495b",
    "line": "#4c78a8",
    "quiet": "#9aa5b1",
}
"""Colours that can be told apart on light and dark backgrounds, and with red-green blindness."""

SCALE = ((0.0, COLOURS["bad"]), (0.5, COLOURS["middling"]), (1.0, COLOURS["good"]))
"""Colours from few decibels to many."""


def graph_objects() -> Any:
    """The module plotly.graph_objects.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    try:
        return import_module("plotly.graph_objects")
    except ImportError as error:
        raise MissingExtraError("report", "plotly") from error


def figure(data: Sequence[Any], **layout: Any) -> Any:
    """A plotly figure without a ground of its own, so that it fits light and dark pages."""
    made = graph_objects().Figure(data=list(data))
    made.update_layout(
        template="none",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        margin={"l": 60, "r": 20, "t": 40, "b": 50},
        height=420,
        **layout,
    )
    # Long labels move the titles of the axes away instead of lying on them.
    made.update_xaxes(automargin=True, title={"standoff": 10})
    made.update_yaxes(automargin=True, title={"standoff": 10})
    return made


def size_treemap(records: Sequence[SizeRecord]) -> Any:
    """The constants of a graph by bytes as stored, in the boxes of their modules.

    The colour is the number of bits that an element takes, qparams included.
    """
    sizes: dict[str, int] = {"": 0}
    bits: dict[str, float] = {}
    for record in records:
        size = record.size_after + record.qparams
        parts = record.name.split(".")
        paths = ["", *(".".join(parts[: n + 1]) for n in range(len(parts)))]
        for path in paths:
            sizes[path] = sizes.get(path, 0) + size
        bits[record.name] = record.bits_per_element
    names = list(sizes)
    box = graph_objects().Treemap(
        ids=[name or "all" for name in names],
        labels=[name.rpartition(".")[2] or "all constants" for name in names],
        parents=["" if not name else name.rpartition(".")[0] or "all" for name in names],
        values=list(sizes.values()),
        branchvalues="total",
        root={"color": "rgba(0,0,0,0)"},
        marker={
            "colors": [bits.get(name) for name in names],
            "colorscale": [[at, colour] for at, colour in reversed_scale()],
            "cmin": 0,
            "cmax": 32,
            "colorbar": {"title": {"text": "bits each"}},
        },
        hovertemplate="%{id}<br>%{value:,} bytes<extra></extra>",
    )
    return figure([box], title={"text": "Bytes by module"})


def reversed_scale() -> list[tuple[float, str]]:
    """The colours of `SCALE` the other way round: little is good."""
    return [(1.0 - at, colour) for at, colour in reversed(SCALE)]
