"""Progress bars of the steps that take long."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

T = TypeVar("T")


def show_progress(items: Iterable[T], text: str, *, enabled: bool) -> Iterator[T]:
    """The items, with a bar on standard error while they last, if that is a terminal.

    Args:
        items: any iterable; one without a length is counted without a total.
        text: what is being done.
        enabled: False shows nothing.
    """
    try:
        total = len(items)  # type: ignore[arg-type]  # an iterator has none
    except TypeError:
        total = None
    columns = SpinnerColumn(), TextColumn(text), MofNCompleteColumn(), TimeElapsedColumn()
    console = Console(stderr=True)
    is_shown = enabled and console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not is_shown) as bar:
        task = bar.add_task(text, total=total)
        for item in items:
            yield item
            bar.advance(task)
