"""The result of `sensitivity`: what each group of operators costs."""

import io
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

from rich.console import Console
from rich.table import Table

from pt2e_quant.analysis.comparison import data_frame
from pt2e_quant.core.json_text import json_text
from pt2e_quant.flow.report.page.section import DataTable, Section
from pt2e_quant.flow.report.page.write_page import notebook_html

VERSION = 1
"""Of the JSON that `Sensitivity.to_json` writes."""


class Method(StrEnum):
    """How the cost of a group is found."""

    EXACT = "exact"
    """The model is run with that group alone quantized."""
    GRADIENT = "gradient"
    """Gradients weigh the rounding errors, (g · error)² of each sample as in the Fisher matrix: one
    backward pass a batch for all groups."""
    WEIGHT = "weight"
    """The relative error of the weights alone; no data is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCost:
    """What quantizing one group alone costs.

    Attributes:
        group: the operator's name in the float program.
        operator: as "aten.linear".
        module: dotted path of the module, "" at the root.
        weights: dotted names of its weights.
        elements: of its weights.
        cost: the higher, the more it costs: by how much the metric falls; without a metric the
            noise in the model's results over their signal, as powers. Of the gradient method an
            estimate of the same; of the weight method the noise of the weights over their signal.
        metric: the metric with this group alone quantized; None without one.
    """

    group: str
    operator: str
    module: str = ""
    weights: tuple[str, ...] = ()
    elements: int = 0
    cost: float
    metric: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """What each group costs; prints as a table.

    Attributes:
        method: how the costs were found.
        recipe: what groups were quantized with.
        groups: in the order of the graph.
        batches: how many were run.
        metric: of the float model, None without one.
    """

    method: Method
    recipe: str
    groups: tuple[GroupCost, ...]
    batches: int
    metric: float | None = None

    def worst(self, count: int = 10) -> list[GroupCost]:
        """The groups that cost most, the worst first."""
        return sorted(self.groups, key=lambda group: group.cost, reverse=True)[:count]

    def group(self, name: str) -> GroupCost | None:
        """The group of an operator by its name in the float program."""
        return next((group for group in self.groups if group.group == name), None)

    def to_dicts(self) -> list[dict[str, Any]]:
        """A dict for each group."""
        return [asdict(group) for group in self.groups]

    def to_json(self) -> str:
        """As JSON; infinity and NaN, which JSON lacks, are null."""
        data = {f.name: getattr(self, f.name) for f in fields(self)} | {"groups": self.to_dicts()}
        return json_text({"version": VERSION, **data})

    def to_pandas(self) -> Any:
        """As a pandas DataFrame, a row for each group.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        return data_frame(self.to_dicts())

    def sections(self) -> list[Section]:
        """A row for each group, the one that costs most first, as a part of a page."""
        rows = [(g.group, g.cost, g.metric, g.elements, g.operator, g.module) for g in self.groups]
        table = DataTable(
            columns=("group", "cost", "metric", "weights", "operator", "module"),
            rows=tuple(rows),
            sort_by=1,
            is_descending=True,
        )
        text = f"Each group alone with {self.recipe}, by the method {self.method}."
        return [Section(title="What each group costs", text=text, table=table, rank=14)]

    def _repr_html_(self) -> str:
        """For notebooks."""
        return notebook_html(self.sections())

    def __iter__(self) -> Iterator[GroupCost]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    def __str__(self) -> str:
        stream = io.StringIO()
        table = Table(title=f"what each group costs ({self.method}, {self.recipe})")
        for name in ("group", "module", "operator", "cost", "metric", "weights"):
            table.add_column(name, overflow="fold")
        for row in self.worst(20):
            shown = "" if row.metric is None else f"{row.metric:.4g}"
            table.add_row(
                row.group, row.module, row.operator, f"{row.cost:.3g}", shown, f"{row.elements:,}"
            )
        Console(file=stream, width=120, no_color=True).print(table)
        return stream.getvalue()
