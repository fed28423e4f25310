"""The profile of a call: operators with their kind, cost and time, as one table."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from pt2e_quant.core.data_frame import data_frame
from pt2e_quant.core.json_text import json_text
from pt2e_quant.flow.report.page.plot import COLOURS, figure, graph_objects
from pt2e_quant.flow.report.page.section import DataTable, Section
from pt2e_quant.flow.report.page.write_page import notebook_html
from pt2e_quant.kernels.cost import Cost


class WorkKind(StrEnum):
    """The kind of work of an operator."""

    INTEGER = "integer"
    """Computes with integers."""
    FLOAT = "float"
    """Computes with floats."""
    CONVERT = "convert"
    """Quantizes, dequantizes or requantizes."""
    MOVE = "move"
    """Moves data only: transposes, copies, slices, changes of layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTime:
    """One operator of a call.

    Args:
        node: its name in the canonical graph; the runtime's own name where it has none there.
        module: the path of the module that it came from, "" where that is not known.
        kernel: what runs it: the fused operator, the runtime's operator, or the float one.
        is_fused: whether a kernel of the registry put it there.
        kind: what it does.
        cost: bytes and operations; operations are 0 for what only moves data, and for operators
            that nothing here counts.
        time_us: the median over the rounds.
    """

    node: str
    module: str
    kernel: str
    is_fused: bool
    kind: WorkKind
    cost: Cost
    time_us: float


@dataclass(frozen=True, slots=True)
class Profile:
    """All operators of a call, in order; prints as a table.

    Args:
        nodes: the operators.
        runtime: what ran them.
        call_us: the median time of a whole call, None where it was not measured.
    """

    nodes: tuple[NodeTime, ...]
    runtime: str = ""
    call_us: float | None = None

    @property
    def time_us(self) -> float:
        """The time of all operators, without the runtime's own between them."""
        return sum(node.time_us for node in self.nodes)

    def share(self, node: NodeTime) -> float:
        """A node's part of the whole, from 0 to 1."""
        return node.time_us / self.time_us if self.time_us else 0.0

    def worst(self, count: int = 10) -> list[NodeTime]:
        """The operators that take longest."""
        return sorted(self.nodes, key=lambda node: -node.time_us)[:count]

    def by_kind(self) -> dict[WorkKind, float]:
        """Microseconds of each kind of work, the longest first; kinds without any are left out."""
        return _summed((node.kind, node.time_us) for node in self.nodes)

    @property
    def share_in_integers(self) -> float:
        """The part of the operators' time that is work in integers, from 0 to 1."""
        return self.by_kind().get(WorkKind.INTEGER, 0.0) / self.time_us if self.time_us else 0.0

    def by_node(self) -> dict[str, float]:
        """Microseconds of each node, all its operators together; the longest first."""
        return _summed((node.node, node.time_us) for node in self.nodes)

    def by_kernel(self) -> dict[str, float]:
        """Microseconds of each kernel, the longest first."""
        return _summed((node.kernel, node.time_us) for node in self.nodes)

    def to_dicts(self) -> list[dict[str, Any]]:
        """A dict for each operator, in order: its fields, with bytes, operations and share."""
        return [
            {
                **{f.name: getattr(node, f.name) for f in fields(node) if f.name != "cost"},
                "bytes": node.cost.bytes,
                "operations": node.cost.operations,
                "share": self.share(node),
            }
            for node in self.nodes
        ]

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame with a row for each operator.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        return data_frame(self.to_dicts())

    def to_json(self) -> str:
        """The profile as JSON."""
        kinds = {kind.value: time for kind, time in self.by_kind().items()}
        return json_text({**asdict(self), "time_us": self.time_us, "by_kind_us": kinds})

    def __str__(self) -> str:
        console = Console(width=140, no_color=True)
        with console.capture() as captured:
            console.print(self.summary(), soft_wrap=True)
            console.print(self.table())
        return captured.get()

    def summary(self) -> str:
        """One line: the time in operators, the share of each kind of work, that of a whole call."""
        kinds = ", ".join(f"{kind} {100 * t / self.time_us:.0f} %" for kind, t in self._shares())
        whole = f"; a call takes {self.call_us:,.0f} us" if self.call_us is not None else ""
        return f"{self.runtime}: {self.time_us:,.0f} us in operators ({kinds}){whole}"

    def table(self) -> Table:
        """The operators, the longest first."""
        table = Table("node", "module", "kernel", "kind")
        for heading in ("bytes", "operations", "us", "share"):
            table.add_column(heading, justify="right")
        for node in self.worst(len(self.nodes)):
            figures = f"{node.cost.bytes:,}", f"{node.cost.operations:,}", f"{node.time_us:.1f}"
            share = f"{100 * self.share(node):.1f} %"
            table.add_row(node.node, node.module, node.kernel, node.kind, *figures, share)
        return table

    def sections(self) -> list[Section]:
        """The operators as a part of a page."""
        columns = ("node", "us", "share %", "kind", "kernel", "bytes", "module")
        rows = [
            (n.node, n.time_us, 100 * self.share(n), n.kind, n.kernel, n.cost.bytes, n.module)
            for n in self.nodes
        ]
        table = DataTable(
            columns=columns, rows=tuple(rows), sort_by=1, is_descending=True, is_one_line=True
        )
        return [
            Section(
                title="Where the time goes",
                text=self.summary(),
                table=table,
                figures={"time by operator": self.figure},
                rank=40,
            )
        ]

    def figure(self, count: int = 25) -> Any:
        """The nodes that take longest, all their operators together: a plotly figure."""
        names = list(self.by_node())[:count][::-1]
        slowest = [node for node in self.nodes if node.node in names]
        order = [f"{name} " for name in names]  # with a space: no text that is a number
        bars = [
            graph_objects().Bar(
                x=[node.time_us for node in slowest if node.kind is kind],
                y=[f"{node.node} " for node in slowest if node.kind is kind],
                orientation="h",
                name=kind.value,
                marker={"color": _COLOURS[kind]},
            )
            for kind in WorkKind
            if any(node.kind is kind for node in slowest)
        ]
        made = figure(bars, title={"text": "Slowest operators"}, barmode="stack")
        made.update_xaxes(title={"text": "microseconds"})
        made.update_yaxes(categoryorder="array", categoryarray=order)
        # Below the bars: beside them it takes what a phone's width leaves behind the names.
        across = {"xref": "container", "x": 0.5, "xanchor": "center"}
        legend = {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", **across}
        made.update_layout(height=160 + 22 * len(names), legend=legend, margin={"b": 90})
        return made

    def _repr_html_(self) -> str:
        """For notebooks."""
        return notebook_html(self.sections(), rows=15)

    def _shares(self) -> Iterable[tuple[WorkKind, float]]:
        return self.by_kind().items() if self.time_us else ()


_COLOURS = {
    WorkKind.INTEGER: COLOURS["good"],
    WorkKind.FLOAT: COLOURS["line"],
    WorkKind.CONVERT: COLOURS["bad"],
    WorkKind.MOVE: COLOURS["middling"],
}

_K = TypeVar("_K")


def _summed(times: Iterable[tuple[_K, float]]) -> dict[_K, float]:
    found: dict[_K, float] = {}
    for key, time in times:
        found[key] = found.get(key, 0.0) + time
    return dict(sorted(found.items(), key=lambda item: -item[1]))
