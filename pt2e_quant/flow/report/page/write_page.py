"""Puts sections together to one file of HTML that needs nothing beside it."""

import base64
import gzip
import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from pt2e_quant.core.errors import ArtifactError
from pt2e_quant.core.whole_file import whole_file
from pt2e_quant.flow.report.page.plot import graph_objects
from pt2e_quant.flow.report.page.section import DataTable, Section

_HERE = "pt2e_quant.flow.report.page"
_DIGITS = 6


def write_page(path: str | Path, title: str, sections: Sequence[Section]) -> None:
    """Write a page: whole or not at all.

    Args:
        path: of the .html file.
        title: of the page.
        sections: in any order; those of a lower rank come first.

    Raises:
        ArtifactError: the path cannot be written.
        MissingExtraError: a section has a figure and plotly is not installed.
    """
    try:
        with whole_file(Path(path)) as stream:
            stream.write(page(title, sections).encode())
    except OSError as error:
        raise ArtifactError(
            f'cannot write "{path}": {error.strerror or error}',
            fix="give a path in a folder that exists and can be written",
        ) from error


def page(title: str, sections: Sequence[Section]) -> str:
    """The text of a page."""
    ordered = sorted(sections, key=lambda section: section.rank)
    data = {"sections": [_data(section) for section in ordered]}
    # A browser unpacks it in some milliseconds; plain it would be three times the size.
    packed = _packed_plotly() if any(section.figures for section in ordered) else ""
    style, script = (
        resources.files(_HERE).joinpath(n).read_text() for n in ("page.css", "page.js")
    )
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<link rel="icon" href="data:,">',
            f"<title>{html.escape(title)}</title><style>{style}</style></head><body>",
            f"<header><h1>{html.escape(title)}</h1><nav>{_links(ordered)}</nav></header>",
            "<main>",
            *(_section(at, section) for at, section in enumerate(ordered)),
            "</main>",
            f'<script type="application/json" id="data">{_json(data)}</script>',
            f'<script type="text/plain" id="plotly">{packed}</script>',
            f"<script>{script}</script></body></html>",
        ]
    )


@cache
def _packed_plotly() -> str:
    """plotly.js of the installed package: gzip in base64."""
    graph_objects()  # says which extra is missing
    code = resources.files("plotly").joinpath("package_data", "plotly.min.js").read_bytes()
    return base64.b64encode(gzip.compress(code, 9, mtime=0)).decode()


def _links(sections: Iterable[Section]) -> str:
    pairs = enumerate(section.title for section in sections)
    return " ".join(f'<a href="#s{at}">{html.escape(title)}</a>' for at, title in pairs)


def _section(at: int, section: Section) -> str:
    parts = [f'<section id="s{at}"><h2>{html.escape(section.title)}</h2>']
    if section.text:
        parts.append(f"<p>{html.escape(section.text)}</p>")
    if section.facts:
        parts.append(facts_html(section.facts))
    if section.table is not None:
        parts.append('<div class="table"></div>')
    if section.figures:
        parts.append('<div class="figure"></div>')
    return "".join([*parts, "</section>"])


def facts_html(facts: Iterable[tuple[str, str]]) -> str:
    """Pairs of a label and a value as a list."""
    pairs = (f"<div><dt>{html.escape(a)}</dt><dd>{html.escape(b)}</dd></div>" for a, b in facts)
    return f"<dl>{''.join(pairs)}</dl>"


def table_html(table: DataTable) -> str:
    """A table without a script, for notebooks."""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in table.columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(_shown(cell))}</td>" for cell in row) + "</tr>"
        for row in table.rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def notebook_html(sections: Iterable[Section], *, rows: int = 10) -> str:
    """Sections for a notebook's cell: facts, and the first rows of tables; no figures."""
    parts = []
    for section in sections:
        parts.append(f"<h4>{html.escape(section.title)}</h4>")
        if section.facts:
            parts.append(facts_html(section.facts))
        if section.table is not None:
            shown = DataTable(columns=section.table.columns, rows=_first(section.table, rows))
            parts.append(table_html(shown))
    return "".join(parts)


def _first(table: DataTable, count: int) -> tuple[Any, ...]:
    rows = list(table.rows)
    at = table.sort_by
    if at is not None:
        rows.sort(key=lambda row: (row[at] is None, _key(row[at], table.is_descending)))
    return tuple(rows[:count])


def _key(cell: Any, is_descending: bool) -> Any:
    if isinstance(cell, (int, float)):
        return -cell if is_descending else cell
    return cell or ""


def _shown(cell: Any) -> str:
    if cell is None:
        return ""
    return f"{cell:.{_DIGITS}g}" if isinstance(cell, float) else str(cell)


def _data(section: Section) -> dict[str, Any]:
    """A section as data for the page's script."""
    made: dict[str, Any] = {
        "figures": {label: json.loads(make().to_json()) for label, make in section.figures.items()}
    }
    if section.table is not None:
        table = section.table
        made["table"] = {
            "columns": table.columns,
            "rows": [[_cell(cell) for cell in row] for row in table.rows],
            "sort": table.sort_by,
            "descending": table.is_descending,
            "picks": table.picks,
            "one_line": table.is_one_line,
        }
    return made


def _cell(cell: Any) -> Any:
    if isinstance(cell, float):
        return float(f"{cell:.{_DIGITS}g}") if math.isfinite(cell) else str(cell)
    return cell


def _json(data: Mapping[str, Any]) -> str:
    # "</script>" inside a text would end the element.
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
