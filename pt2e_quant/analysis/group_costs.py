"""The cost of each group of operators: three ways to weigh it, and the result of `sensitivity`."""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any, TypeAlias

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils import _pytree as pytree

from pt2e_quant.analysis.float_twin import FloatTwin, Group, Values, quantized_source
from pt2e_quant.analysis.measure import Noise, as_floats
from pt2e_quant.analysis.metric import Metric, MetricSum
from pt2e_quant.core.data_frame import data_frame
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.inexact import is_inexact
from pt2e_quant.core.json_text import json_text
from pt2e_quant.core.progress import show_progress
from pt2e_quant.flow.report.page.section import DataTable, Section
from pt2e_quant.flow.report.page.write_page import notebook_html

VERSION = 1
"""Version of the JSON that `Sensitivity.to_json` writes."""


class Method(StrEnum):
    """Method that estimates the cost of a group."""

    EXACT = "exact"
    """The model is run with that group alone quantized."""
    GRADIENT = "gradient"
    """Gradients weigh the rounding errors, (g · error)² of each sample as in the Fisher matrix: one
    backward pass a batch for all groups."""
    WEIGHT = "weight"
    """The relative error of the weights alone; no data is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCost:
    """The cost of quantizing one group alone.

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
    """The cost of each group; prints as a table.

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
        """Return JSON; infinity and NaN, which JSON lacks, are null."""
        data = {f.name: getattr(self, f.name) for f in fields(self)} | {"groups": self.to_dicts()}
        return json_text({"version": VERSION, **data})

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame with a row for each group.

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
        """Return HTML for notebooks."""
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


Build: TypeAlias = Callable[[Sequence[Any]], Any]
"""Puts the leaves of a result into the model's own structure."""


def check_measure(method: Method, metric: Metric | None, loss: object) -> None:
    """Refuse a measure that a method would not look at.

    Raises:
        ConfigError: there is one.
    """
    if metric is not None and method is not Method.EXACT:
        other = "loss=…, a scalar with a gradient, or " if method is Method.GRADIENT else ""
        raise ConfigError(
            f'the method "{method}" takes no metric',
            fix=f'give {other}method="exact"',
        )
    if loss is not None and method is not Method.GRADIENT:
        raise ConfigError(
            f'the method "{method}" takes no loss',
            fix='choose method="gradient", or give metric=… with method="exact"',
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One batch: the call's leaves in placeholder order, and what the metric compares with."""

    leaves: Sequence[Any]
    targets: Any


class OutputNoise:
    """Noise over signal of a model's results, summed over batches."""

    def __init__(self) -> None:
        self.sums = Noise()

    def add(self, found: Sequence[Any], expected: Sequence[Any]) -> None:
        """Add the results of one batch, and those of the float model."""
        for a, b in zip(expected, found, strict=True):
            if is_inexact(a):
                self.sums.add(*as_floats(a, b))

    def value(self) -> float:
        """Noise over signal, as powers."""
        return self.sums.noise / self.sums.signal if self.sums.signal else 0.0


class ExactCosts:
    """Runs the model once for each group and batch, and only what is behind the group.

    Args:
        twin: the graph.
        build: of the model's results.
        metric: of outputs and targets; None for the noise in the results.
    """

    def __init__(self, twin: FloatTwin, build: Build, metric: Metric | None) -> None:
        self.twin = twin
        self.build = build
        self.metric = metric
        self.sums = {group.name: self._sum() for group in twin.groups}
        self.float_sum = self._sum()

    def _sum(self) -> MetricSum | OutputNoise:
        return OutputNoise() if self.metric is None else MetricSum(self.metric)

    def add(self, call: Call, *, progress: str) -> None:
        """Weigh all groups on one batch.

        Args:
            call: the batch.
            progress: the text of the progress bar, "" for none.
        """
        values = self.twin.float_values(call.leaves)
        expected = pytree.tree_leaves(
            values[self.twin.gm.graph.output_node()], is_leaf=lambda value: value is None
        )
        self._add(self.float_sum, expected, expected, call.targets)
        for group in show_progress(self.twin.groups, progress, enabled=bool(progress)):
            found = self.twin.run(values, group.dequantizes)
            self._add(self.sums[group.name], found, expected, call.targets)

    def _add(
        self, sums: MetricSum | OutputNoise, found: Sequence[Any], expected: Any, targets: Any
    ) -> None:
        if isinstance(sums, OutputNoise):
            sums.add(found, expected)
        else:
            sums.add(self.build(found), targets)

    def state(self) -> list[list[float]] | None:
        """The sums so far as numbers; None of a metric that keeps its own."""
        every = [self.float_sum, *self.sums.values()]
        return None if any(_is_opaque(s) for s in every) else [_numbers(s) for s in every]

    def restore(self, state: Sequence[Sequence[float]]) -> None:
        """Go on from an earlier `state`."""
        for sums, (first, second) in zip([self.float_sum, *self.sums.values()], state, strict=True):
            if isinstance(sums, OutputNoise):
                sums.sums.signal, sums.sums.noise = first, second
            else:
                sums.total, sums.samples = first, int(second)


def _is_opaque(sums: MetricSum | OutputNoise) -> bool:
    return isinstance(sums, MetricSum) and sums.function is None


def _numbers(sums: MetricSum | OutputNoise) -> list[float]:
    if isinstance(sums, OutputNoise):
        return [sums.sums.signal, sums.sums.noise]
    return [sums.total, sums.samples]


class GradientCosts:
    """Weighs the rounding errors of all groups by the gradients of one backward pass a batch.

    The cost is the sum of (gradient · error)² over samples, and over output channels of weights.
    Without a loss the gradients are of a random projection of the results (signs, drawn anew for
    each batch): the sum is on average the noise in the results, to first order (Gauss-Newton), and
    is divided by their signal.

    Args:
        twin: the graph.
        build: of the model's results.
        loss: of outputs and targets, a scalar with a gradient; None for the projection.
    """

    def __init__(
        self, twin: FloatTwin, build: Build, loss: Callable[[Any, Any], Tensor] | None
    ) -> None:
        self.twin = twin
        self.build = build
        self.loss = loss
        self.sums = {group.name: 0.0 for group in twin.groups}
        self.signal = 0.0
        self.batches = 0

    def add(self, call: Call) -> None:
        """Weigh all groups on one batch."""
        values, leaves = self._values_with_gradients(call.leaves)
        results = [
            torch.view_as_real(v) if v.is_complex() else v
            for v in pytree.tree_leaves(values[self.twin.gm.graph.output_node()])
            if is_inexact(v)
        ]
        if self.loss is None:
            generator = torch.Generator().manual_seed(self.batches)
            loss = sum((_signs(v, generator) * v).sum() for v in results)
            self.signal += sum(float(v.detach().square().sum()) for v in results)
        else:
            loss = self.loss(self.build(pytree.tree_leaves(values[self._output()])), call.targets)
            self.signal += 1.0
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            raise ConfigError(
                "the gradient method needs results that depend on quantized tensors by a gradient",
                fix='choose method="exact"',
            )
        self.batches += 1
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        with torch.no_grad():
            for group in self.twin.groups:
                self.sums[group.name] += sum(self._weighed(group, values, leaves))

    def _output(self) -> Any:
        return self.twin.gm.graph.output_node()

    def _values_with_gradients(self, leaves: Sequence[Any]) -> tuple[Values, dict[Any, Tensor]]:
        twin = self.twin
        tracked: dict[Any, Tensor] = {}
        weights = twin.float_weights

        def leaf(value: Tensor) -> Tensor:
            return value.detach().clone().requires_grad_()

        try:
            twin.float_weights = {node: leaf(value) for node, value in weights.items()}
            tracked |= twin.float_weights
            given = [
                leaf(v) if isinstance(v, Tensor) and v.is_floating_point() else v for v in leaves
            ]
            with torch.enable_grad():
                values = twin.float_values(given, copies=False, apart=True)
        finally:
            twin.float_weights = weights
        for group in twin.groups:
            for node in group.dequantizes:
                value = values[node] if quantized_source(node) is not None else None
                if isinstance(value, Tensor) and value.requires_grad:
                    value.retain_grad()
                    tracked[node] = value
        return values, tracked

    def _weighed(
        self, group: Group, values: Values, tracked: Mapping[Any, Tensor]
    ) -> Iterator[float]:
        # What adds up before it is squared: the readers of one value see one error, and a bias may
        # be there to take the mean error of its weight back.
        found: dict[Any, Tensor | float] = {}
        for node in group.dequantizes:
            value = tracked.get(node)
            if value is None or value.grad is None:
                continue
            error = self.twin.rounded(node, values) - value
            # Of each sample, or each output channel of a weight: errors inside of it may add up.
            rows = (error.double() * value.grad.double()).reshape(
                len(value) if value.dim() else 1, -1
            )
            key = quantized_source(node) or (*node.users, len(rows))
            found[key] = found.get(key, 0.0) + rows.sum(1)
        for sums in found.values():
            yield float(torch.as_tensor(sums).square().sum())

    def costs(self) -> dict[str, float]:
        """The estimate for each group."""
        return {name: total / self.signal for name, total in self.sums.items()}

    def state(self) -> list[list[float]]:
        """The sums so far as numbers."""
        return [[self.signal, self.batches], [*self.sums.values()]]

    def restore(self, state: Sequence[Sequence[float]]) -> None:
        """Go on from an earlier `state`."""
        (self.signal, batches), totals = state
        self.batches = int(batches)
        self.sums = dict(zip(self.sums, totals, strict=True))


def _signs(like: Tensor, generator: torch.Generator) -> Tensor:
    drawn = torch.randint(0, 2, like.shape, generator=generator)
    return (2 * drawn - 1).to(like)


def weight_costs(twin: FloatTwin) -> dict[str, float]:
    """Noise over signal of each group's weights, as powers; 0 for one without weights.

    Biases are no part of it: what one is moved by takes error back.
    """
    found = {}
    for group in twin.groups:
        sums = Noise()
        for node in group.dequantizes & twin.float_weights.keys():
            if twin.float_weights[node].dim() < 2:
                continue
            values: Values = {}
            sums.add(*as_floats(twin.float_weights[node], twin.rounded(node, values)))
        found[group.name] = sums.noise / sums.signal if sums.signal else 0.0
    return found
