"""advise: what to do about the tensors that lose accuracy, with the line to add."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import torch
from torch.fx import GraphModule, Node

from pt2e_quant.analysis.comparison import Comparison, NodeError
from pt2e_quant.analysis.graph_side import GraphSide, Site, WeightSite
from pt2e_quant.backends.artifact import Artifact
from pt2e_quant.core.data_frame import data_frame
from pt2e_quant.core.errors import ConfigError, module_path, module_type
from pt2e_quant.core.json_text import json_text
from pt2e_quant.core.qdq import is_dequantize
from pt2e_quant.flow.report.page.section import DataTable, Section
from pt2e_quant.flow.report.page.write_page import notebook_html
from pt2e_quant.graph.meta import constant_of, origin_name
from pt2e_quant.graph.ops import CONV, HARDTANH, LINEAR, RELU6, argument, is_call

_LOW_DB = 20.0
"""A tensor above this SQNR by its own rounding needs no advice."""

_MASK = 1e4
"""A range that reaches this far in front of a softmax has taken a mask's constant in."""

_EXCEEDED = 0.01
"""Ranges count as exceeded by this share of their width,"""

_CLIPPED = 1e-3
"""where this share of the values is clipped,"""

_FAR_EXCEEDED = 0.25
"""or by this share of their width, where fewer are."""

_INT32_MAX = 2**31 - 1

_CALIBRATE = "pq.calibrate(prepared, batches)  # batches like those of evaluation"

_RELU6_MODULES = ("ReLU6", "Hardtanh")

_TINY = float(torch.finfo(torch.float32).tiny)
"""The least float32 with all its digits."""


VERSION = 1
"""Version of the JSON that `AdviceList.to_json` writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One thing to do.

    Attributes:
        rule: its name: "outlier channels", "mask in the range", "relu6 half empty",
            "bias overflow", "denormal scale", "range exceeded".
        node: the node, by its name in the float program.
        module: its module, "" at the root.
        evidence: what was found, with the figures.
        line: of Python, to add or to change; `quantizer` is what `prepare` gets.
    """

    rule: str
    node: str
    module: str
    evidence: str
    line: str

    def __str__(self) -> str:
        where = f"{self.node} ({self.module})" if self.module else self.node
        return f"{self.rule}: {where}: {self.evidence}\n    {self.line}"


class AdviceList(tuple[Advice, ...]):
    """A tuple of recommendations; prints, and renders on pages and in notebooks."""

    __slots__ = ()

    def to_dicts(self) -> list[dict[str, Any]]:
        """A dict for each advice."""
        return [asdict(advice) for advice in self]

    def to_json(self) -> str:
        """Return JSON."""
        return json_text({"version": VERSION, "advice": self.to_dicts()})

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame with a row for each advice.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        return data_frame(self.to_dicts())

    def sections(self) -> list[Section]:
        """A row for each advice as a part of a page."""
        columns = ("rule", "node", "evidence", "line to add", "module")
        rows = tuple((a.rule, a.node, a.evidence, a.line, a.module) for a in self)
        text = "" if rows else "No rule found anything."
        table = DataTable(columns=columns, rows=rows) if rows else None
        return [Section(title="What to do about it", text=text, table=table, rank=10)]

    def _repr_html_(self) -> str:
        """Return HTML for notebooks."""
        return notebook_html(self.sections())

    def __str__(self) -> str:
        return "\n".join(map(str, self))


def advise(quantized: GraphModule | Artifact, comparison: Comparison | None = None) -> AdviceList:
    """Derive recommendations from the records of a quantized graph and a comparison of it.

    What the graph itself shows comes first, then the nodes of the comparison, the worst first.

    Args:
        quantized: of `convert`, or an artifact that was lowered from it.
        comparison: of `compare` with the float program, on data like that of evaluation.

    Raises:
        ConfigError: the graph is not quantized, or the artifact was loaded without one.
    """
    gm = quantized.quantized if isinstance(quantized, Artifact) else quantized
    fix = "give the result of pq.convert(prepared), or of pq.quantize(…)"
    if not isinstance(gm, GraphModule):
        raise ConfigError(
            "advise needs a quantized graph, which files of artifacts do not hold", fix=fix
        )
    side = GraphSide(gm, "")
    if not side.is_quantized:
        raise ConfigError("advise needs a quantized graph: this one is float", fix=fix)
    found = [advice for rule in _OF_GRAPHS for advice in rule(side)]
    rows = () if comparison is None else comparison.activations
    for row in sorted(rows, key=lambda row: row.cost_db):
        if (site := side.sites.get(row.node)) is not None:
            # The first one explains the others.
            every = (rule(side, site, row) for rule in _OF_ROWS)
            found += [advice for advice in every if advice is not None][:1]
    return AdviceList(found)


def _keep_float(nodes: Iterable[Node]) -> str:
    names = [*dict.fromkeys(node.name for node in nodes)]
    pattern = names[0] if len(names) == 1 else f"re:{'|'.join(names)}"
    return f'quantizer.set_node("{pattern}", None)'


def _quantizing(side: GraphSide, site: Site) -> Iterator[Node]:
    """The operators for which a value is quantized: what makes it, and what reads its integers."""
    node = site.node
    yield node
    while not any(map(is_dequantize, node.all_input_nodes)):  # a relu behind its convolution
        before = [n for n in node.all_input_nodes if n not in side.constants]
        if len(before) != 1 or before[0].op != "call_function":
            break
        yield (node := before[0])
    moved = {s.node: s for s in side.sites.values() if s.moved_from is not None}
    todo = [site]
    while todo:
        for reader in _readers(todo.pop()):
            yield reader
            if reader in moved:
                todo.append(moved[reader])


def _mask_in_range(side: GraphSide, site: Site, row: NodeError) -> Advice | None:
    """The range holds the constant that a mask is written with."""
    if row.range_kept is None or row.range_kept[0] > -_MASK:
        return None
    if not row.channel_peaks or row.range_kept[1] > -row.range_kept[0] / 10:
        return None
    return Advice(
        rule="mask in the range",
        node=row.node,
        module=row.module,
        evidence=f"its range starts at {row.range_kept[0]:.3g}, which is a mask's constant: one "
        f"step is {(row.range_kept[1] - row.range_kept[0]) / 255:.3g} wide",
        line=_keep_float(_quantizing(side, site)),
    )


def _outlier_channels(side: GraphSide, site: Site, row: NodeError) -> Advice | None:
    """A few channels set the step, and the others are rounded away."""
    lost = row.own_channel_db
    if not row.outlier_channels or lost is None or lost > _LOW_DB:
        return None
    named = ", ".join(map(str, row.outlier_channels[:5]))
    named = f"channels {named} are" if len(row.outlier_channels) > 1 else f"channel {named} is"
    readers = _readers(site)
    if readers and all(is_call(node, LINEAR) for node in readers):
        line = 'pq.prepare(program, quantizer, algorithms=["smooth_quant"])'
    else:
        line = _keep_float(_quantizing(side, site))
    return Advice(
        rule="outlier channels",
        node=row.node,
        module=row.module,
        evidence=f"{named} far larger than the others, of which the median keeps {lost:.1f} dB",
        line=line,
    )


def _readers(site: Site) -> list[Node]:
    """The operators that read a quantized value."""
    integers = [] if site.quantize is None else list(site.quantize.users)
    return [user for node in integers if is_dequantize(node) for user in node.users]


def _range_exceeded(side: GraphSide, site: Site, row: NodeError) -> Advice | None:
    """Evaluation has values that calibration did not see."""
    record = site.record
    kept = row.range_kept if record is None or record.observed is None else record.observed
    if kept is None or not row.share_clipped:
        return None
    width = kept[1] - kept[0]
    below, above = kept[0] - row.range_seen[0], row.range_seen[1] - kept[1]
    least = _EXCEEDED if row.share_clipped >= _CLIPPED else _FAR_EXCEEDED
    if max(below, above) <= least * width:
        return None
    return Advice(
        rule="range exceeded",
        node=row.node,
        module=row.module,
        evidence=f"calibration saw {kept[0]:.3g} to {kept[1]:.3g}, this data has "
        f"{row.range_seen[0]:.3g} to {row.range_seen[1]:.3g}: {row.share_clipped:.2%} is clipped",
        line=_CALIBRATE,
    )


def _relu6_half_empty(side: GraphSide, site: Site, row: NodeError) -> Advice | None:
    """The range is that of relu6, and the values fill less than half of it."""
    if not is_call(site.node, RELU6 + HARDTANH) or row.range_kept is None:
        return None
    if row.grid_used is None or row.grid_used >= 0.5 or row.range_kept[1] < 5.9:
        return None
    line = f"torch.relu(…)  # in place of relu6: {row.source}"
    seen = None if site.record is None else site.record.observed
    if seen is not None and seen[1] >= 0.99 * row.range_kept[1]:
        line = _CALIBRATE  # Without relu6 these data would set a wider range.
    elif module_type(site.node) in _RELU6_MODULES:
        line = f'model.set_submodule("{row.module}", torch.nn.ReLU())'
    return Advice(
        rule="relu6 half empty",
        node=row.node,
        module=row.module,
        evidence=f"its values end at {row.range_seen[1]:.3g} and the range at "
        f"{row.range_kept[1]:.3g}: {row.grid_used:.0%} of the integers are used",
        line=line,
    )


def _bias_overflow(side: GraphSide) -> Iterator[Advice]:
    """A bias that int32 does not hold in steps of the input's scale times the weight's."""
    for weight in side.weights.values():
        steps = _bias_steps(side, weight)
        if steps > _INT32_MAX * (1 - 2**-20):  # a stored one ends there, as rounded in float32
            yield Advice(
                rule="bias overflow",
                node=origin_name(weight.reader),
                module=module_path(weight.reader),
                evidence=f"its bias takes {steps:.3g} steps of the input's scale times the "
                "weight's, more than int32 holds",
                line=_keep_float([weight.reader]),
            )


def _bias_steps(side: GraphSide, weight: WeightSite) -> float:
    """The largest step of a bias: of the stored one, or of the float one beside a weight."""
    if weight.qparams is not None and weight.qparams.dtype == torch.int32:
        source = weight.node.args[0]
        stored = constant_of(side.gm, source) if isinstance(source, Node) else None
        return 0.0 if stored is None else float(stored.double().abs().max())
    scale = _product_scale(side, weight)
    bias = _bias_of(side, weight.reader)
    if scale is None or bias is None or bias.numel() not in (scale.numel(), 1):
        return 0.0
    return float((bias.abs().double() / scale).max())


def _bias_of(side: GraphSide, node: Node) -> torch.Tensor | None:
    if not is_call(node, LINEAR + CONV):
        return None
    bias = argument(node, "bias")
    return constant_of(side.gm, bias) if isinstance(bias, Node) else None


def _product_scale(side: GraphSide, weight: WeightSite) -> torch.Tensor | None:
    """The scale of an operator's sums of products, one for each output channel."""
    if weight.qparams is None or weight.qparams.group_size is not None:
        return None
    given = {s.quantize: s.qparams for s in side.sites.values() if s.quantize and s.qparams}
    for node in weight.reader.all_input_nodes:
        source = node.args[0] if is_dequantize(node) else None
        if isinstance(source, Node) and source in given:
            return weight.qparams.scale.double().flatten() * float(given[source].scale)
    return None


def _denormal_scale(side: GraphSide) -> Iterator[Advice]:
    """A scale, or a product of scales, that float32 has no digits for."""
    for weight in side.weights.values():
        product = _product_scale(side, weight)
        scales = [] if weight.qparams is None else [weight.qparams.scale]
        scales += [] if product is None else [product]
        least = min((float(scale.min()) for scale in scales), default=math.inf)
        if least < _TINY:
            yield Advice(
                rule="denormal scale",
                node=origin_name(weight.reader),
                module=module_path(weight.reader),
                evidence=f"a scale of {weight.name}, or its product with the input's, is "
                f"{least:.3g}: runtimes may round it to zero",
                line=_keep_float([weight.reader]),
            )


OfRow: TypeAlias = Callable[[GraphSide, Site, NodeError], Advice | None]
OfGraph: TypeAlias = Callable[[GraphSide], Iterator[Advice]]

_OF_ROWS: tuple[OfRow, ...] = (
    _mask_in_range,
    _outlier_channels,
    _range_exceeded,
    _relu6_half_empty,
)
_OF_GRAPHS: tuple[OfGraph, ...] = (_bias_overflow, _denormal_scale)
