"""The result of `compare`: an entry for each activation and each weight."""

import io
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

from rich.console import Console
from rich.table import Table

from pt2e_quant.core.data_frame import data_frame
from pt2e_quant.core.json_text import json_text
from pt2e_quant.flow.report.page.section import DataTable, Section
from pt2e_quant.flow.report.page.write_page import notebook_html

VERSION = 1
"""Version of the JSON that `Comparison.to_json` writes."""

_SHOWN = 20
"""The number of rows of a printed comparison."""


class Part(StrEnum):
    """The kind of tensor that a row of a comparison measures."""

    ACTIVATION = "activation"
    WEIGHT = "weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeError:
    """The error of one tensor of the other side against the reference.

    Figures of a quantized activation are of its values behind the dequantize.

    Attributes:
        node: the name in the float program, as torch.export gives it; of a weight, of the operator
            that reads it.
        part: an activation or a weight.
        tensor: the node's name, or the dotted name of the parameter.
        operator: as "aten.conv2d".
        module: dotted path of the module, "" at the root.
        source: the user's source line, "" if not known.
        sqnr_db: what has accumulated up to here: 10 log10 of the signal over the noise.
        cosine: of the two values, over all batches.
        max_error: the largest difference.
        max_steps: the largest difference in steps of the tensor's own scale; None in float.
        kl: divergence of the histogram of the other side's values from the reference's, in nats.
        own_sqnr_db: of the error that the node adds by itself, when it is fed the values of the
            reference; None where the other side cannot be fed.
        own_channel_db: the same of the median channel: what outlier channels cost the others hides
            in the sum.
        own_max_steps: the largest error of that kind, in steps.
        worst_channel: the channel with the least SQNR of a weight, else None.
        worst_channel_db: its SQNR.
        range_seen: smallest and largest value of the reference.
        range_kept: smallest and largest value that the quantized tensor can have; None where that
            is not a constant of the whole tensor.
        share_clipped: of the reference's values, those outside of `range_kept`.
        grid_used: the share of `range_kept` that lies in `range_seen`.
        outlier_channels: whose largest value is far above the median channel's.
        channel_peaks: the largest absolute value of each channel of an activation's reference.
        dtype: of the integers, "" in float.
        excess_db: SQNR of the noise that was not there in any input; what ranks rows where
            `own_sqnr_db` is None.
    """

    node: str
    part: Part
    tensor: str
    operator: str
    module: str = ""
    source: str = ""
    sqnr_db: float
    cosine: float
    max_error: float
    max_steps: float | None = None
    kl: float | None = None
    own_sqnr_db: float | None = None
    own_channel_db: float | None = None
    own_max_steps: float | None = None
    worst_channel: int | None = None
    worst_channel_db: float | None = None
    range_seen: tuple[float, float] = (0.0, 0.0)
    range_kept: tuple[float, float] | None = None
    share_clipped: float = 0.0
    grid_used: float | None = None
    outlier_channels: tuple[int, ...] = ()
    channel_peaks: tuple[float, ...] = ()
    dtype: str = ""
    excess_db: float = math.inf

    @property
    def cost_db(self) -> float:
        """The key that ranks rows, lowest first: the SQNR of what this tensor itself loses.

        Of an activation the lower one of all values and of the median channel. Of a weight, of its
        worst channel: a channel that is lost is an output that is lost.
        """
        if self.part is Part.WEIGHT:
            return self.sqnr_db if self.worst_channel_db is None else self.worst_channel_db
        if self.own_sqnr_db is None or self.own_channel_db is None:
            return self.excess_db
        return min(self.own_sqnr_db, self.own_channel_db)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two forms of one model, node by node; prints as a table.

    Attributes:
        reference: what was compared with, in words.
        other: what was compared, in words.
        nodes: the rows: weights first, then activations in the order of the graph.
        batches: how many were run.
        sqnr_db: of the results of the whole call.
        notes: what could not be compared, and why.
    """

    reference: str
    other: str
    nodes: tuple[NodeError, ...]
    batches: int
    sqnr_db: float
    notes: tuple[str, ...] = ()

    @property
    def activations(self) -> tuple[NodeError, ...]:
        """The rows of activations."""
        return tuple(row for row in self.nodes if row.part is Part.ACTIVATION)

    @property
    def weights(self) -> tuple[NodeError, ...]:
        """The rows of weights."""
        return tuple(row for row in self.nodes if row.part is Part.WEIGHT)

    def worst(self, count: int = 10) -> list[NodeError]:
        """The nodes that lose most by themselves, the worst first; of each its worst row."""
        found: dict[str, NodeError] = {}
        for row in sorted(self.nodes, key=lambda row: row.cost_db):
            found.setdefault(row.node, row)
        return list(found.values())[:count]

    def node(self, name: str) -> NodeError | None:
        """The row of an activation by the name of its node."""
        return next((row for row in self.activations if row.node == name), None)

    def to_dicts(self) -> list[dict[str, Any]]:
        """A dict for each row, with `cost_db` besides its fields."""
        return [{**asdict(row), "cost_db": row.cost_db} for row in self.nodes]

    def to_json(self) -> str:
        """Return JSON; infinity and NaN, which JSON lacks, are null."""
        data = {f.name: getattr(self, f.name) for f in fields(self)} | {"nodes": self.to_dicts()}
        return json_text({"version": VERSION, **data})

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame with a row for each of `nodes`.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        return data_frame(self.to_dicts())

    def sections(self) -> list[Section]:
        """A row for each node, the one that loses most by itself first, as a part of a page."""
        columns = ("tensor", "own dB", "dB here", "steps", "clipped %", "grid %", "operator")
        rows = [
            (
                *(row.tensor, row.cost_db, row.sqnr_db, row.max_steps, 100 * row.share_clipped),
                *(None if row.grid_used is None else 100 * row.grid_used, row.operator),
                *(row.module, row.source),
            )
            for row in self.nodes
        ]
        return [
            Section(
                title="Which tensors hurt most",
                text=f"{self.other} against {self.reference}: results at {self.sqnr_db:.1f} dB. "
                "Own dB: the error that a tensor adds by itself; dB here: what arrives with it.",
                table=DataTable(
                    columns=(*columns, "module", "source"),
                    rows=tuple(rows),
                    sort_by=1,
                    picks=0,
                    is_one_line=True,
                ),
                rank=-1,  # what the page is opened for
            )
        ]

    def _repr_html_(self) -> str:
        """Return HTML for notebooks."""
        return notebook_html(self.sections())

    def __iter__(self) -> Iterator[NodeError]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    def __str__(self) -> str:
        stream = io.StringIO()
        console = Console(file=stream, width=140, no_color=True)
        console.print(self._table())
        for note in self.notes:
            console.print(f"note: {note}", soft_wrap=True)
        return stream.getvalue()

    def _table(self) -> Table:
        title = f"{self.other} against {self.reference}: {self.sqnr_db:.1f} dB"
        table = Table(title=title, caption="the worst nodes by their own error first")
        for name in ("node", "tensor", "operator", "own dB", "dB here", "steps", "clipped", "grid"):
            table.add_column(name, overflow="fold")
        for row in self.worst(_SHOWN):
            table.add_row(
                row.node,
                row.tensor if row.part is Part.WEIGHT else "",
                row.operator,
                f"{row.cost_db:.1f}",
                f"{row.sqnr_db:.1f}",
                _shown(row.max_steps, ".1f"),
                f"{row.share_clipped:.1%}",
                _shown(row.grid_used, ".0%"),
            )
        return table


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
