"""The result of `tune`: an artifact, its recipe, what was chosen and why, and the front."""

import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pt2e_quant.backends.artifact import Artifact
from pt2e_quant.backends.target.recipe_file import RecipeFile
from pt2e_quant.core.data_frame import data_frame
from pt2e_quant.core.json_text import json_text
from pt2e_quant.flow.report.page.plot import COLOURS, figure, graph_objects
from pt2e_quant.flow.report.page.section import DataTable, Section
from pt2e_quant.flow.report.page.write_page import notebook_html

VERSION = 1
"""Version of the JSON that `Tuned.to_json` writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One mix of schemes that was built and measured.

    Args:
        label: what it is.
        metric: what was measured.
        size: bytes of all constants, qparams included.
        share_quantized: of the linear operations.
        recipe: that makes it.
        latency_us: what a call took on the backend; None where no time was asked for.
        given_up: at how many groups the recipe was given up, and how far (a step of the menu
            counts one); 0 under a budget, which does not ask for that.
    """

    label: str
    metric: float
    size: int
    share_quantized: float
    recipe: RecipeFile
    latency_us: float | None = None
    given_up: float = 0.0

    @property
    def cost(self) -> float:
        """The cost, weighed against the metric: microseconds where known, else bytes."""
        return self.size if self.latency_us is None else self.latency_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The scheme chosen for one group, and the reason.

    Args:
        group: the operator's name in the float program.
        module: dotted path of its module.
        operator: as "aten.linear".
        scheme: what it got.
        tied: the groups that move together with it.
        noise: scheme to the noise over signal that it adds to the results alone.
        why: a sentence.
    """

    group: str
    module: str
    operator: str
    scheme: str
    tied: tuple[str, ...]
    noise: dict[str, float]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The result of `tune`; prints as tables.

    Args:
        artifact: the model, lowered.
        recipe: makes it again: `recipe.save("file.toml")`, `quantize(recipe="file.toml")`.
        metric: of the quantized graph on the evaluation data.
        float_metric: of the float model there.
        share_quantized: of the linear operations, how many compute with quantized weights.
        front: the mixes measured of which none is smaller (faster, under a budget of time), better
            and, where a metric was asked for, nearer to the recipe, the smallest first.
        measured: all mixes that were measured.
        choices: a row for each group, in graph order.
        notes: what the user should know.
        latency_us: what a call took on the backend; None where no time was asked for.
    """

    artifact: Artifact
    recipe: RecipeFile
    metric: float
    float_metric: float
    share_quantized: float
    front: tuple[Point, ...]
    measured: tuple[Point, ...]
    choices: tuple[Choice, ...]
    notes: tuple[str, ...] = ()
    latency_us: float | None = None

    def to_json(self) -> str:
        """Return JSON; infinity and NaN, which JSON lacks, are null."""
        return json_text({"version": VERSION, **self.to_dict()})

    def to_dict(self) -> dict[str, Any]:
        """The fields but for the artifact."""
        return {
            "metric": self.metric,
            "float_metric": self.float_metric,
            "share_quantized": self.share_quantized,
            "latency_us": self.latency_us,
            "recipe": asdict(self.recipe),
            "front": [asdict(point) for point in self.front],
            "choices": [asdict(choice) for choice in self.choices],
            "notes": list(self.notes),
        }

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame with a row for each mix of `measured`.

        `is_front` says which are of the front, `is_chosen` which is the artifact's.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        return data_frame(self.to_dicts())

    def to_dicts(self) -> list[dict[str, Any]]:
        """A dict for each mix that was measured, without its recipe."""
        return [
            {
                **{f.name: getattr(point, f.name) for f in fields(point) if f.name != "recipe"},
                "is_front": point in self.front,
                "is_chosen": point.recipe == self.recipe,
            }
            for point in self.measured
        ]

    def to_html(self, path: str | Path) -> None:
        """Write the page of the artifact's report with the front and the choices."""
        self.artifact.report.to_html(path, self)

    def figure(self) -> Any:
        """The mixes that were measured, and the front: a plotly figure."""
        chosen = [point for point in self.measured if point.recipe == self.recipe]
        by_time = self.latency_us is not None
        is_curve = not any(point.given_up for point in self.front)
        mode = "lines+markers" if is_curve else "markers"
        made = figure(
            [
                _dots("measured", self.measured, COLOURS["quiet"], mode="markers"),
                _dots("front", self.front, COLOURS["good"], mode=mode),
                _dots("chosen", chosen, COLOURS["bad"], mode="markers", symbol="star", size=16),
            ],
            title={"text": f"{'Time' if by_time else 'Size'} and accuracy"},
        )
        made.update_xaxes(title={"text": "us of a call" if by_time else "bytes of constants"})
        made.update_yaxes(title={"text": "metric"})
        return made

    def sections(self) -> list[Section]:
        """The front and the choices as parts of a page."""
        columns = ("group", "scheme", "why", "operator", "module")
        rows = tuple((c.group, c.scheme, c.why, c.operator, c.module) for c in self.choices)
        return [
            Section(
                title="Search",
                facts=(
                    ("metric", f"{self.metric:.7g} (float {self.float_metric:.7g})"),
                    ("quantized linears", f"{100 * self.share_quantized:.0f} %"),
                ),
                figures={"front": self.figure},
                rank=4,
            ),
            Section(
                title="What each group got", table=DataTable(columns=columns, rows=rows), rank=6
            ),
        ]

    def _repr_html_(self) -> str:
        """Return HTML for notebooks."""
        return notebook_html(self.sections())

    def __str__(self) -> str:
        stream = io.StringIO()
        console = Console(file=stream, width=140, no_color=True)
        console.print(
            f"metric {self.metric:.7g} (float {self.float_metric:.7g}), "
            f"{100 * self.share_quantized:.0f} % of the linear operations quantized",
            soft_wrap=True,
        )
        table = Table("mix", "metric", "bytes", "us", "quantized", title="front")
        for point in self.front:
            share = f"{100 * point.share_quantized:.0f} %"
            took = "" if point.latency_us is None else f"{point.latency_us:,.0f}"
            table.add_row(point.label, f"{point.metric:.7g}", f"{point.size:,}", took, share)
        console.print(table)
        if changed := [c for c in self.choices if c.scheme != self.recipe.recipe]:
            table = Table("group", "scheme", "why", title=f"what is not {self.recipe.recipe}")
            for choice in changed:
                table.add_row(choice.group, choice.scheme, choice.why)
            console.print(table)
        for note in self.notes:
            console.print(f"note: {note}", soft_wrap=True)
        return stream.getvalue()


def _dots(name: str, points: Sequence[Point], colour: str, *, mode: str, **marker: Any) -> Any:
    return graph_objects().Scatter(
        x=[point.cost for point in points],
        y=[point.metric for point in points],
        mode=mode,
        name=name,
        text=[point.label for point in points],
        marker={"color": colour, "size": 10, **marker},
    )


def front_of(points: tuple[Point, ...], *, higher_is_better: bool = True) -> tuple[Point, ...]:
    """The points of which no other is as cheap, as near to the recipe, and as good."""
    sign = 1.0 if higher_is_better else -1.0
    found: list[Point] = []
    for point in sorted(points, key=lambda p: (p.cost, p.given_up, -sign * p.metric)):
        if not any(
            other.given_up <= point.given_up and sign * other.metric >= sign * point.metric
            for other in found
        ):
            found.append(point)
    return tuple(found)
