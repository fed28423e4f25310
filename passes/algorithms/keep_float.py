"""Leave operators float that their own rounding spoils, however good everything before them is."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf, isfinite, log10
from typing import Any, ClassVar

import torch
from torch.fx import Node

from pt2e_quant.core.recurrent_ops import ROUNDING_KEY, RecurrentLayer, Rounding
from pt2e_quant.core.specs import Q_ANNOTATION_KEY
from pt2e_quant.graph.meta import attribute
from pt2e_quant.graph.ops import arguments, layer_operands
from pt2e_quant.observers.statistics.base import Statistics
from pt2e_quant.passes.algorithms.algorithm import BARRED_KEY, Algorithm, Site, Stage, record_float
from pt2e_quant.passes.algorithms.algorithm_graph import (
    AlgorithmGraph,
    is_quantized_output,
    unobserved,
)
from pt2e_quant.passes.algorithms.bias_correction import LAYERS, channels_first
from pt2e_quant.passes.algorithms.grid import Declined
from pt2e_quant.passes.algorithms.observed_run import (
    energy,
    exact_run,
    filled,
    rounded_as_observed,
)
from pt2e_quant.passes.algorithms.range_groups import is_chosen
from pt2e_quant.passes.recurrent.round_recurrent import rounding_of

MOST_CALLS = 2
"""In so many calls layers are looked at."""
LEAST_DB = 20.0
"""Below this SQNR a layer's own rounding takes more than a tenth of its output's amplitude; layers
that int8 suits are far above (docs/decisions/040)."""

HALF_DB = 10 * log10(2)
LEAST_STEPS = 253
"""Of a weight of 8 bits, from -127 to 127 for example."""

_LAYERS = (*LAYERS, RecurrentLayer)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepFloat(Algorithm):
    """Leave a layer float whose own rounding costs more than a tenth of its output.

    Each linear, convolution and recurrent layer is computed once more in some kept calls, from the
    float model's values, with its weight and what it reads rounded. Most lose little. A product by
    differences (a matrix that centers its input, a wavelet) and a layer that reads powers of a
    spectrum in all their orders of magnitude can lose all of it, whatever ranges and integers the
    algorithms before this one chose. The input of such a layer stays rounded where it comes from an
    operator in integers, which else would become float too.

    Of a recurrent layer first its inputs and states stay float, and its weights in integers, where
    that is enough.

    Args:
        least_db: the SQNR of its output that a layer must reach to stay in integers.
        any_observer: also where somebody chose the observers of activations.
    """

    name: ClassVar[str] = "keep_float"
    paper: ClassVar[str] = (
        "after the layer by layer analysis of Nagel et al. 2021, A white paper on neural network "
        "quantization, arXiv 2106.08295"
    )
    fits: ClassVar[str] = "linears, convolutions and recurrent layers with 8-bit integer weights"
    stage: ClassVar[Stage] = Stage.CORRECTIONS
    needs_calls: ClassVar[bool] = True
    needs_float: ClassVar[bool] = True

    least_db: float = LEAST_DB
    any_observer: bool = True

    def sites(self, graph: AlgorithmGraph) -> Iterable[Site]:
        """One for the whole graph, at its first layer."""
        if not self.any_observer and is_chosen(graph.gm):
            return []
        return [Site(graph, layer, "layers") for layer in _layers(graph)[:1]]

    def apply(self, site: Site, statistics: Statistics | None) -> str:
        """Look at all layers, and leave those float that are too far off."""
        graph = site.graph
        if graph.gathered.kept is None or not graph.gathered.kept.sample:
            raise Declined("no calibration data reached it")
        with torch.no_grad():
            annotated = _look(graph, {layer: [_annotated(layer)] for layer in _layers(graph)})
            spoiled = [layer for layer, (way,) in annotated.items() if way.db < self.least_db]
            others = _look(graph, {layer: _others(graph, layer) for layer in spoiled})
        left = [
            self._leave(graph, layer, annotated[layer][0].db, ways)
            for layer, ways in others.items()
        ]
        if not any(left):
            raise Declined("no layer is spoiled by its own rounding")
        return ", ".join(filter(None, left))

    def _leave(self, graph: AlgorithmGraph, layer: Node, db: float, ways: list["_Way"]) -> str:
        """Change a layer that is at `db` to the first way that is good enough; says how.

        Where none is, the best one is taken if it is better by half of the noise.
        """
        way = next((w for w in ways if w.db >= self.least_db), max(ways, key=lambda w: w.db))
        if way.db < db + HALF_DB:
            return ""
        way.take(graph, layer)
        told = f"its own rounding leaves {db:.1f} dB of its output; {way.text}"
        _, weight = layer_operands(layer)
        record_float(
            graph,
            layer,
            f"{self.name}: {told}",
            *([weight.meta["val"]] if graph.observer(weight) is None else []),
            fix=f'quantizer.remove_algorithm("{self.name}") leaves it in integers',
            is_choice=True,
        )
        return f"{layer.name} ({db:.1f} dB, {way.text})"


@dataclass(slots=True)
class _Way:
    """One way to compute a layer, and how far its results are from the float model's.

    Args:
        text: what is different from how it was annotated.
        rounds: which of its observers still round.
        rounding: of a recurrent layer.
    """

    text: str
    rounds: Callable[[Node], bool]
    rounding: Rounding | None = None
    signal: float = 0.0
    noise: float = 0.0
    rows: int = 0
    means: torch.Tensor | float = 0.0

    def add(self, layer: Node, exact: torch.Tensor, found: torch.Tensor) -> None:
        """Add what a call gave."""
        error = found - exact
        self.signal += energy(exact)
        self.noise += energy(error)
        if layer.target is not RecurrentLayer and arguments(layer)["bias"] is not None:
            by_channel = channels_first(layer, error)
            self.rows += by_channel.numel() // by_channel.shape[1]
            self.means = self.means + by_channel.sum((0, 2))

    @property
    def db(self) -> float:
        """SQNR of the output; the mean error of each channel goes into a bias later on."""
        noise = self.noise
        if isinstance(self.means, torch.Tensor):
            varying = noise - energy(self.means) / self.rows
            noise = varying * self.rows / max(1, self.rows - 1)
        if not isfinite(noise):
            return -inf
        return 10 * log10(self.signal / noise) if noise > 0 < self.signal else inf

    def take(self, graph: AlgorithmGraph, layer: Node) -> None:
        """Compute the layer so from now on, with the float model's weights where they are float."""
        for observed in [n for n in layer.all_input_nodes if graph.observer(n) is not None]:
            if self.rounds(observed):
                continue
            gathered = graph.gathered
            layer.replace_input_with(observed, unobserved(observed))
            if not observed.users:
                gathered.observers.pop(observed, None)
                gathered.least_scales.pop(observed, None)
                graph.gm.graph.erase_node(observed)
        if graph.observer(layer_operands(layer)[1]) is None:
            # A bias too, which no observer need stand behind: it made up for the rounded weight.
            for source in layer.all_input_nodes:
                if (value := graph.gathered.floats.pop(source, None)) is not None:
                    made = graph.editor.rebind(source, value, reader=layer)
                    layer.replace_input_with(source, made)
            layer.meta.pop(Q_ANNOTATION_KEY, None)
        if self.rounding is not None:
            layer.meta[ROUNDING_KEY] = str(self.rounding)


def _annotated(layer: Node) -> _Way:
    """The way in which a layer is computed."""
    return _Way("", _always, rounding_of(layer) if layer.target is RecurrentLayer else None)


def _others(graph: AlgorithmGraph, layer: Node) -> list[_Way]:
    """How else a layer can be computed, the least change first."""
    if layer.target is RecurrentLayer:
        in_float = _Way("in float", _never, Rounding.NONE)
        if rounding_of(layer) is Rounding.NONE:
            return [in_float]
        return [_Way("weights in integers, all else float", _always, Rounding.NONE), in_float]
    data, _ = layer_operands(layer)
    if graph.observer(data) is None or not is_quantized_output(unobserved(data)):
        return [_Way("in float", _never)]
    return [_Way("in float, its input rounded", lambda observed: observed is data)]


def _always(observed: Node) -> bool:
    return True


def _never(observed: Node) -> bool:
    return False


def _layers(graph: AlgorithmGraph) -> list[Node]:
    """The layers with weights of 8 bits: who asked for fewer knows that they cost more."""
    found = []
    for layer in graph.quantized(_LAYERS):
        observer = graph.observer(layer_operands(layer)[1])
        least, greatest = (getattr(observer, name, 0) for name in ("quant_min", "quant_max"))
        is_barred = KeepFloat.name in layer.meta.get(BARRED_KEY, ())
        if (greatest or 0) - (least or 0) >= LEAST_STEPS and not is_barred:
            found.append(layer)
    return found


_Ways = dict[Node, list[_Way]]


def _look(graph: AlgorithmGraph, ways: _Ways) -> _Ways:
    """Run the float model, and layers once more in some ways; these have signal and noise then."""
    kept = graph.gathered.kept
    assert kept is not None  # `apply` has looked
    if ways:
        looker = _Looker(graph, ways)
        for call in kept.sample[:MOST_CALLS]:
            looker.call(call)
    return ways


class _Looker:
    """Runs the float model, and layers once more from its values."""

    def __init__(self, graph: AlgorithmGraph, ways: _Ways) -> None:
        self.graph, self.ways = graph, ways
        self.weights = {layer_operands(layer)[1] for layer in ways}
        self.run = exact_run(graph.gm, graph.gathered.floats)
        self.run.after = self._look
        self.known: dict[Node, Any] = {}
        """Rounded weights, and rounded values of this call."""

    def call(self, inputs: Sequence[Any]) -> None:
        """Look at all layers in one call."""
        self.run.call(inputs)
        self.known = {node: v for node, v in self.known.items() if node in self.weights}

    def _look(self, node: Node, value: Any) -> None:
        if node not in self.ways:
            return
        exact = value[0] if node.target is RecurrentLayer else value
        for way in self.ways[node]:
            way.add(node, exact.float(), self._output(node, way))

    def _output(self, node: Node, way: _Way) -> torch.Tensor:
        def read(operand: Node) -> Any:
            is_rounded = self.graph.observer(operand) is not None and way.rounds(operand)
            return self._rounded(operand) if is_rounded else self.run.env[operand]

        given = {name: filled(value, read) for name, value in arguments(node).items()}
        if way.rounding is not None:
            given["rounding"] = str(way.rounding)
        target: Any = node.target
        found = target(**given)
        made: torch.Tensor = found[0] if node.target is RecurrentLayer else found
        return made.float()

    def _rounded(self, observed: Node) -> Any:
        if observed not in self.known:
            gm, source = self.graph.gm, observed.all_input_nodes[0]
            # Weights as algorithms made them: the run has the float model's.
            is_constant = source.op == "get_attr"
            value = attribute(gm, str(source.target)) if is_constant else self.run.env[observed]
            observer = attribute(gm, str(observed.target))
            self.known[observed] = rounded_as_observed(observer, value)
        return self.known[observed]
