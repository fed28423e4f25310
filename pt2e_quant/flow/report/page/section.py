"""Sections of a page: facts, a table and figures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

Cell: TypeAlias = str | float | int | None
"""A text or a number; None leaves the cell empty. Numbers are sorted as numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataTable:
    """A table that the reader sorts and filters.

    Args:
        columns: headings.
        rows: a cell for each column.
        sort_by: the column that it is sorted by at first, None to leave the order.
        is_descending: the largest first.
        picks: the column whose text chooses a figure of the page by its label; None for none.
        is_one_line: a row stays on one line, as in tables of figures; long texts are cut.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    sort_by: int | None = None
    is_descending: bool = False
    picks: int | None = None
    is_one_line: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One part of a page.

    Args:
        title: heading.
        text: a paragraph below it.
        facts: pairs of a label and a value.
        table: at most one.
        figures: label to what makes a plotly figure, called when a page is written; of several
            the reader chooses one from a list.
        rank: sections of a lower rank come first.
    """

    title: str
    text: str = ""
    facts: tuple[tuple[str, str], ...] = ()
    table: DataTable | None = None
    figures: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    rank: int = 50


class HasSections(Protocol):
    """Anything that a page can show."""

    def sections(self) -> Sequence[Section]:
        """Its parts of a page."""
