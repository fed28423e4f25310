"""compare: two forms of one model, node by node."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from pt2e_quant.analysis.comparison import Comparison, NodeError, Part
from pt2e_quant.analysis.graph_side import GraphSide, Site, WeightSite, moved
from pt2e_quant.analysis.measure import ChannelNoise, Noise, PairFigures, as_floats, outliers
from pt2e_quant.analysis.measure import ratio_db as to_db
from pt2e_quant.analysis.open_side import (
    ArtifactSide,
    Program,
    artifact_program,
    open_file,
    open_graph,
    reference_program,
)
from pt2e_quant.backends.artifact import Artifact
from pt2e_quant.core.errors import ConfigError, module_path, source_line
from pt2e_quant.core.inexact import is_inexact
from pt2e_quant.core.progress import show_progress
from pt2e_quant.core.qparams import QParams, quantize
from pt2e_quant.flow.calibrate.calibrate import check_batches
from pt2e_quant.flow.calibrate.pick_inputs import InputPick, bind_batch, pick_inputs
from pt2e_quant.flow.report.worst_tensors import as_read, by_channel
from pt2e_quant.graph.meta import origin_name
from pt2e_quant.graph.op_table import operator_name

Model = nn.Module | ExportedProgram | Artifact | Program | str | Path
"""A form of a model that `compare` takes."""

Side = GraphSide | ArtifactSide


def compare(
    reference: Model,
    other: Model,
    batches: Iterable[Any],
    *,
    inputs: InputPick | None = None,
    quantized: GraphModule | None = None,
    progress: bool = True,
) -> Comparison:
    """Compare two forms of one model, node by node.

    The other side is run twice on each batch: once as it is, for what has accumulated up to each
    node, and once with every operator fed the reference's values, for what it adds by itself. Of
    a lowered program the second run is its graph's.

    Args:
        reference: what is right: a module, a program of torch.export, a prepared, converted or
            integer graph, an artifact, or the path of a file that an artifact saved.
        other: what is looked at, one of the same.
        batches: as `calibrate` takes them. Memory does not grow with their number.
        inputs: what of each batch the model takes, as `calibrate` has it.
        quantized: the graph of `convert` that an artifact was lowered from, where it was loaded
            from a file. Without it of a `.pte`, and of a program of `cpu` or `cuda`, only the
            results are compared: a note says so.
        progress: show a progress bar on a terminal.

    Returns:
        The rows; `.worst(10)` are the nodes that lose most by themselves.

    Raises:
        ConfigError: a side is something else, there is no batch, or no value is in both.
        InputError: a batch does not fit.
    """
    check_batches(batches, "compare(reference, other, {})")
    taken = iter(batches)
    first = next(taken, None)
    if first is None:
        raise ConfigError(
            "there is no batch to compare on",
            fix="give at least one batch; an iterator that was used up before gives none",
        )
    models = open_file(reference), open_file(other)
    comparing = _Comparing(*_open_both(*models, pick_inputs(first, inputs), quantized))
    lacking = [m.report.provenance.lacks for m in models if isinstance(m, Artifact)]
    shown = show_progress(itertools.chain([first], taken), "comparing", enabled=progress)
    for batch in shown:
        sides = comparing.left, comparing.right
        calls = (bind_batch(side.capture, batch, inputs, call="compare") for side in sides)
        comparing.add(*calls)
    return comparing.result([text for text in lacking if text])


def _open_both(
    reference: object, other: object, batch: Any, quantized: GraphModule | None
) -> tuple[Side, Side]:
    programs = [_program(model, quantized) for model in (reference, other)]
    graphs = [
        model if isinstance(model, GraphModule) else None if program is None else program.quantized
        for model, program in zip((reference, other), programs, strict=True)
    ]
    sides: list[Side | None] = []
    for model, program, beside in zip((reference, other), programs, graphs[::-1], strict=True):
        if program is None:
            sides.append(_open_graph(model, batch, beside))
        else:
            sides.append(None if program.quantized is None else ArtifactSide(program, ()))
    # A program without its graph is read by the names of the other side's values.
    like = [site for side in sides if side is not None for site in side.sites.values()]
    left, right = (
        side if side is not None or program is None else ArtifactSide(program, like)
        for side, program in zip(sides, programs, strict=True)
    )
    assert left is not None
    assert right is not None
    return left, right


def _program(model: object, quantized: GraphModule | None) -> Program | None:
    if isinstance(model, Program):
        return model
    if isinstance(model, Artifact):
        return artifact_program(model, quantized)
    return reference_program(model) if isinstance(model, GraphModule) else None


def _open_graph(model: object, batch: Any, beside: GraphModule | None) -> GraphSide:
    side = open_graph(model, batch, beside)
    if side is None:
        raise ConfigError(
            f"compare takes two forms of a model, found {type(model).__name__}",
            fix="give a module, a program of torch.export, a graph, or an artifact",
        )
    return side


@dataclass(slots=True)
class _Figures:
    """The figures of one activation: the accumulated error, and its own."""

    pair: PairFigures = field(default_factory=PairFigures)
    own: ChannelNoise = field(default_factory=ChannelNoise)


class _Comparing:
    """The sums of one comparison."""

    def __init__(self, left: Side, right: Side) -> None:
        self.left = left
        self.right = right
        # Of an artifact the graph is fed: against that graph itself it would have no error.
        self.feeds = right.can_be_fed and (isinstance(right, GraphSide) or not left.is_quantized)
        # What a graph stands in for says nothing about a program that is held against a graph.
        hidden = left.unread if self.feeds else left.unread | right.unread
        self.names = [n for n in right.sites if n in left.sites and n not in hidden]
        if not self.names and left.sites and right.sites:
            raise ConfigError(
                "no value of the one graph has a counterpart in the other",
                fix="give two forms of one exported program: the names of its nodes join them",
            )
        self.figures = {name: _Figures() for name in self.names}
        self.batches = 0
        self.results = Noise()
        self.weights: list[NodeError] = []
        self.unlike: set[str] = set()

    def add(self, left: Sequence[Any], right: Sequence[Any]) -> None:
        """Run one call through both sides."""
        known: dict[str, Tensor] = {}

        def keep(site: Site, value: Tensor) -> None:
            if site.name in self.figures:
                known[site.name] = self.right.sites[site.name].from_program(site.to_program(value))

        is_first = not self.batches
        ours: dict[str, Tensor] | None = {} if is_first else None
        theirs: dict[str, Tensor] | None = {} if is_first else None
        expected = self.left.run(left, keep, weights=ours)
        found = self.right.run(right, lambda s, v: self._accumulated(known, s, v), weights=theirs)
        if self.feeds:
            taken = theirs if isinstance(self.right, ArtifactSide) else None
            self.right.run(right, lambda s, v: self._own(known, s, v), given=known, weights=taken)
        self.batches += 1
        for a, b in zip(expected, found, strict=False):
            if is_inexact(a) and is_inexact(b) and a.shape == b.shape:
                self.results.add(*as_floats(a, b))
        if ours is not None and theirs is not None:
            self._add_weights(ours, theirs)

    def _accumulated(self, known: dict[str, Tensor], site: Site, value: Tensor) -> None:
        expected = known.get(site.name)
        if expected is None:
            return
        if expected.shape != value.shape:
            self.unlike.add(site.name)
            del known[site.name]
            return
        kept = site.range_kept
        if kept is not None and site.qparams is not None:
            half = float(site.qparams.scale) / 2
            kept = kept[0] - half, kept[1] + half
        self.figures[site.name].pair.add(*_as_read(site, expected, value), kept)

    def _own(self, known: Mapping[str, Tensor], site: Site, value: Tensor) -> None:
        expected = known.get(site.name)
        if expected is None or expected.shape != value.shape:
            return
        pair = _as_read(site, expected, value)
        if site.moved_from is not None:
            # It keeps the integers that it reads: their rounding is not its own.
            rounded = _as_read(site, moved(site, expected), value)
            pair = min(pair, rounded, key=lambda p: float((p[0] - p[1]).square().sum()))
        self.figures[site.name].own.add(*pair)

    def _add_weights(self, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
        for name, site in self.right.weights.items():
            expected, found = ours.get(name), theirs.get(name)
            if expected is None or found is None or expected is found:
                continue
            expected = site.from_program(self.left.weights[name].to_program(expected))
            if expected.shape != found.shape:
                self.unlike.add(name)
                continue
            self.weights.append(_weight_row(site, expected, found))

    def result(self, notes: list[str]) -> Comparison:
        """The rows of everything that was added, and further notes."""
        rows = [self._row(name) for name in self.names if self.figures[name].pair.elements]
        if self.unlike:
            notes.append(f"not compared, of other shapes: {', '.join(sorted(self.unlike))}")
        for side in (self.left, self.right):
            if not side.sites:
                notes.append(
                    f"{side.words} gives no values from inside, and its graph is not known: only "
                    "results are compared; give the graph of convert, compare(…, quantized=graph)"
                )
        missing = [name for name in self.right.sites if name not in self.left.sites]
        if self.left.sites and missing:
            notes.append(f"without a counterpart in the reference: {', '.join(missing)}")
        if unread := sorted(self.right.unread & self.figures.keys()):
            notes.append(f"as the graph has them, no values of the program: {', '.join(unread)}")
        return Comparison(
            reference=self.left.words,
            other=self.right.words,
            nodes=(*self.weights, *rows),
            batches=self.batches,
            sqnr_db=self.results.sqnr_db,
            notes=tuple(notes),
        )

    def _row(self, name: str) -> NodeError:
        site, figures = self.right.sites[name], self.figures[name]
        pair = figures.pair
        step = float(site.qparams.scale) if site.qparams is not None else None
        seen, kept = (pair.low, pair.high), site.range_kept
        node = self.left.sites[name].node
        return NodeError(
            node=name,
            part=Part.ACTIVATION,
            tensor=name,
            operator=operator_name(node) if node.op == "call_function" else "input",
            module=module_path(node),
            source=source_line(node),
            sqnr_db=pair.error.sqnr_db,
            cosine=pair.cosine,
            max_error=pair.error.largest,
            max_steps=None if step is None else pair.error.largest / step,
            kl=pair.kl,
            own_sqnr_db=figures.own.error.sqnr_db if self.feeds else None,
            own_channel_db=figures.own.median_db if self.feeds else None,
            own_max_steps=figures.own.error.largest / step if self.feeds and step else None,
            range_seen=seen,
            range_kept=kept,
            share_clipped=pair.clipped / pair.elements,
            grid_used=None if kept is None else _used(seen, kept),
            outlier_channels=pair.outlier_channels,
            channel_peaks=() if pair.channels is None else tuple(pair.channels.tolist()),
            dtype=_shown_dtype(site.qparams),
            excess_db=self._excess_db(name),
        )

    def _excess_db(self, name: str) -> float:
        """SQNR of the noise that is in none of the inputs."""

        def share(of: str) -> float:
            error = self.figures[of].pair.error
            return error.noise / error.signal if error.signal else math.inf if error.noise else 0.0

        before = max((share(n) for n in self.right.inputs_of(name, self.figures)), default=0.0)
        if before == math.inf:  # nothing can be said of what comes behind NaN or infinity
            return math.inf
        return to_db(1.0, max(share(name) - before, 0.0))


def _as_read(site: Site, expected: Tensor, found: Tensor) -> tuple[Tensor, Tensor]:
    """Two values of an activation as its readers see them, in float32."""
    return as_floats(as_read(expected, site.record), as_read(found, site.record))


def _used(seen: tuple[float, float], kept: tuple[float, float]) -> float:
    """The share of a range that values lie in."""
    width = kept[1] - kept[0]
    return max(0.0, min(seen[1], kept[1]) - max(seen[0], kept[0])) / width if width > 0 else 0.0


def _shown_dtype(qparams: QParams | None) -> str:
    return "" if qparams is None else str(qparams.dtype).removeprefix("torch.")


def _weight_row(site: WeightSite, reference: Tensor, found: Tensor) -> NodeError:
    """The row of one weight."""
    qparams, reader = site.qparams, site.reader
    a, b = as_floats(reference, found)
    pair = PairFigures()
    pair.add(a, b, None)
    axis = qparams.axis if qparams is not None and qparams.axis is not None else 0
    worst, worst_db = _worst_channel(by_channel(a, axis), by_channel(b, axis))
    clipped, used, steps, kept = _on_grid(a, b, qparams)
    return NodeError(
        node=origin_name(reader),
        part=Part.WEIGHT,
        tensor=site.name,
        operator=operator_name(reader),
        module=module_path(reader),
        source=source_line(reader),
        sqnr_db=pair.error.sqnr_db,
        cosine=pair.cosine,
        max_error=pair.error.largest,
        max_steps=steps,
        kl=pair.kl,
        worst_channel=worst,
        worst_channel_db=worst_db,
        range_seen=(pair.low, pair.high),
        range_kept=kept,
        share_clipped=clipped,
        grid_used=used,
        outlier_channels=outliers(by_channel(a, axis).abs().amax(1)),
        dtype=_shown_dtype(qparams),
    )


_LEAST_ENERGY = 1e-6
"""A channel with less than this share of the mean channel's energy is as good as zero."""


def _worst_channel(reference: Tensor, found: Tensor) -> tuple[int, float]:
    signal = reference.double().square().sum(1)
    noise = (found - reference).double().square().sum(1)
    # Of a channel that is as good as zero, the noise is measured by the others' energy.
    ratios = noise / signal.clamp(min=float(signal.mean()) * _LEAST_ENERGY)
    at = int(ratios.nan_to_num(0.0).argmax())
    return at, to_db(1.0, float(ratios[at])) if float(signal.sum()) else math.inf


def _on_grid(
    reference: Tensor, found: Tensor, qparams: QParams | None
) -> tuple[float, float | None, float | None, tuple[float, float] | None]:
    """Share clipped, share of the grid used, the largest error in steps, and the range kept."""
    if qparams is None or qparams.group_size is not None:
        return 0.0, None, None, None
    shape = [1] * reference.dim()
    if qparams.axis is not None:
        shape[qparams.axis] = -1
    scale, zero = qparams.scale.reshape(shape), qparams.zero_point.reshape(shape)
    low, high = (qparams.quant_min - zero) * scale, (qparams.quant_max - zero) * scale
    outside = (reference < low - scale / 2) | (reference > high + scale / 2)
    integers = quantize(found, qparams)
    used = float(integers.max()) - float(integers.min())
    steps = ((found - reference).abs() / scale).max()
    return (
        float(outside.double().mean()),
        used / (qparams.quant_max - qparams.quant_min),
        float(steps),
        (float(low.min()), float(high.max())),
    )
