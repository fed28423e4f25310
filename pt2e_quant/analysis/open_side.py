"""One side of a comparison from any form of a model: program, graph, artifact or file.

An ONNX model gives its inner values as further outputs. Other runtimes have no such outputs
(ExecuTorch's wheel is built without its event tracer, and its delegates keep theirs): the graph
is lowered once more, with the values behind quantizes as results of their own.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from pt2e_quant.analysis.graph_side import GraphSide, Site, Visit, WeightSite
from pt2e_quant.backends.artifact import Artifact
from pt2e_quant.backends.cut_graph import values_to_compare, with_values
from pt2e_quant.backends.parity import backend_of
from pt2e_quant.backends.registry import get, name_for_suffix, suffixes
from pt2e_quant.backends.sample_run import copied_leaves, run_graph
from pt2e_quant.core.capture import Capture
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.qdq import is_qdq
from pt2e_quant.core.read_capture import CAPTURE_KEY, capture_of, rebuild_capture
from pt2e_quant.flow.calibrate.pick_inputs import as_call, call_with
from pt2e_quant.flow.calibrate.sample import Sample
from pt2e_quant.flow.convert.integer_reference import (
    REFERENCE_OF_KEY,
    ReferenceOf,
    integer_reference,
)
from pt2e_quant.flow.prepare.prepare_pt2e import PREPARE_PASSES, captured
from pt2e_quant.flow.prepare.prepared import PREPARED_KEY
from pt2e_quant.graph.alias import mutated_buffers
from pt2e_quant.graph.ops import CLAMP, HARDTANH, RELU, RELU6, is_call
from pt2e_quant.graph.pipeline import run_passes
from pt2e_quant.graph.subgraphs import copy_graph
from pt2e_quant.one_call import capture_model
from pt2e_quant.tensors.graphs.graph import quantized_weights, to_graph

CLAMPING = RELU + RELU6 + HARDTANH + CLAMP

RunLeaves: TypeAlias = Callable[[Sequence[Any]], Sequence[Any]]
"""Runs a call's leaves."""

ValuesReader: TypeAlias = Callable[
    [Sequence[str], Sequence[str]], tuple[tuple[str, ...], RunLeaves]
]
"""Takes names of quantized and of float values; returns those there are, and what gives them."""


def open_graph(model: object, batch: Any, like: GraphModule | None = None) -> GraphSide | None:
    """A side that is a graph; None for what is none.

    A float model goes through what prepare does with every graph (batch norms are folded, for
    example), so that it has the nodes and the weights that a quantized one was made of.

    Args:
        model: a module, a program of torch.export, or a float, prepared or converted graph.
        batch: a call that a module is captured with, as `calibrate` takes it.
        like: the other side's graph: a module is captured with its dynamic dimensions.
    """
    if isinstance(model, GraphModule) and is_quantized(model):
        words = "the prepared graph" if PREPARED_KEY in model.meta else "the quantized graph"
        return GraphSide(model, words)
    if isinstance(model, GraphModule):
        return GraphSide(_as_prepared(copy_graph(model)), "the float graph")
    if isinstance(model, ExportedProgram):
        return GraphSide(_as_prepared(captured(model)), "the float program")
    if isinstance(model, nn.Module):
        shapes = rebuild_capture(like).dynamic_shapes() if like is not None else None
        if quantized_weights(model):
            gm = call_with(
                lambda taken: to_graph(model, *as_call(taken), dynamic_shapes=shapes), batch
            )
            return GraphSide(gm, f"the quantized module {type(model).__name__}")
        program = call_with(lambda taken: capture_model(model, *as_call(taken), shapes), batch)
        return GraphSide(_as_prepared(captured(program)), f"the module {type(model).__name__}")
    return None


def is_quantized(gm: GraphModule) -> bool:
    """True if a graph is prepared, or has quantize or dequantize operators."""
    return PREPARED_KEY in gm.meta or any(is_qdq(node) for node in gm.graph.nodes)


def _as_prepared(gm: GraphModule) -> GraphModule:
    """A float graph as prepare makes it; edited in place, its tensors are not written."""
    capture = rebuild_capture(gm, mutated_buffers(gm))
    run_passes(gm, PREPARE_PASSES)
    gm.meta[CAPTURE_KEY] = capture
    return gm


def open_file(model: object) -> object:
    """The artifact of a file whose path is given; anything else as it is.

    Raises:
        ConfigError: no backend writes such files.
    """
    if not isinstance(model, (str, Path)):
        return model
    name = name_for_suffix(Path(model).suffix)
    if name is None:
        raise ConfigError(
            f'no backend writes files that end in "{Path(model).suffix}": {model}',
            fix=f"give a file that ends in one of {', '.join(suffixes())}, or what is loaded",
        )
    return get(name).load(model)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program that can be run, and whose graph can be lowered again with other results.

    Args:
        words: what it is.
        capture: the call that it takes.
        quantized: the graph that it was made of; None if it is not known.
        run: runs a call's leaves; returns the result's.
        lower: makes what runs of a graph like that one.
        values_reader: of an artifact that gives values from inside.
    """

    words: str
    capture: Capture
    quantized: GraphModule | None
    run: RunLeaves
    lower: Callable[[GraphModule], RunLeaves]
    values_reader: ValuesReader | None = None


def artifact_program(artifact: Artifact, quantized: GraphModule | None) -> Program:
    """A lowered program; `quantized` is its graph if it has none itself."""

    def lower(gm: GraphModule) -> RunLeaves:
        return _from_reset(backend_of(artifact).lower(gm, verify=False, strict=False))

    return Program(
        words=f"the program of {artifact.report.backend}",
        capture=artifact.capture,
        quantized=artifact.quantized if quantized is None else quantized,
        run=_from_reset(artifact),
        lower=lower,
        values_reader=getattr(artifact, "values_reader", None),
    )


def reference_program(gm: GraphModule) -> Program | None:
    """A graph of `integer_reference`; None for any other graph."""
    made_of = gm.meta.get(REFERENCE_OF_KEY)
    if not isinstance(made_of, ReferenceOf):
        return None

    def lower(graph: GraphModule) -> RunLeaves:
        settings = made_of.arithmetic
        bits = settings.accumulator_bits
        made = integer_reference(graph, settings.profile, accumulator_bits=bits)
        return partial(_run_graph, made)

    return Program(
        words="the integer reference",
        capture=capture_of(gm),
        quantized=made_of.graph,
        run=partial(_run_graph, gm),
        lower=lower,
    )


def _from_reset(artifact: Artifact) -> RunLeaves:
    def run(leaves: Sequence[Any]) -> Sequence[Any]:
        artifact.reset()
        return artifact.run_leaves(leaves)

    return run


def _run_graph(gm: GraphModule, leaves: Sequence[Any]) -> Sequence[Any]:
    return run_graph(gm, Sample(leaves=tuple(leaves), float_outputs=None))


class ArtifactSide:
    """A program whose values can be read.

    Args:
        program: what runs.
        like: the activations of the other side, whose names are looked for if its graph is not
            known.
    """

    def __init__(self, program: Program, like: Iterable[Site]) -> None:
        self.program = program
        self.capture = program.capture
        self.words = program.words
        quantized = program.quantized
        self.graph = None if quantized is None else GraphSide(quantized, "the quantized graph")
        self.is_quantized = True
        self.weights: dict[str, WeightSite] = {} if self.graph is None else self.graph.weights
        shown, self._read = self._reader([*like] if self.graph is None else [])
        self.shown = tuple(shown)
        self.sites = {site.name: site for site in shown}
        self.unread: frozenset[str] = frozenset()
        """The values of the graph that the program gives none of."""
        if self.graph is not None:
            self.unread = frozenset(self.graph.sites) - self.sites.keys()
            self.sites = self.graph.sites

    @property
    def can_be_fed(self) -> bool:
        """True if its nodes can be given the values of another side, as those of a graph can."""
        return self.graph is not None

    def _reader(self, like: Sequence[Site]) -> tuple[list[Site], RunLeaves]:
        """The values that can be read, and what reads them in this order."""
        if self.program.values_reader is not None:
            rounded, plain = self._named(like)
            clamped = _clamped(rounded)
            names = [*dict.fromkeys([*rounded, *clamped])]
            found, read = self.program.values_reader(names, list(plain))
            # The quantize of a value may clamp it: then it is the clamp's own.
            known = {
                name: rounded.get(name) or plain.get(name)
                if clamped.get(name, name) in found
                else rounded[clamped[name]]
                for name in found
            }
            if found:
                return _shown(found, known, read)
        if self.graph is None:
            return [], lambda leaves: []
        gm = self.graph.gm
        kept = {*values_to_compare(gm)}
        by_value: dict[Node, Site] = {}
        for site in self.graph.sites.values():
            readers = [site.node] if site.quantize is None else list(site.quantize.users)
            value = next((node for node in readers if node in kept), None)
            if value is not None:
                by_value[value] = site
        tapped, places = with_values(gm, [node.name for node in by_value])
        lowered = self.program.lower(tapped)

        def read_results(leaves: Sequence[Any]) -> Sequence[Any]:
            results = lowered(leaves)
            return [results[at] for at in places]

        return list(by_value.values()), read_results

    def _named(self, like: Sequence[Site]) -> tuple[dict[str, Site], dict[str, Site]]:
        """The quantized and the float values to look for, by the names of the lowered graph."""
        if self.graph is not None:
            sites = [*self.graph.sites.values()]
            rounded = {s.node.name: s for s in sites if s.quantize is not None}
            plain = {s.node.name: s for s in sites if s.quantize is None}
        else:
            # Any may be quantized. In-place operators are written out of place before lowering.
            plain = {
                name: replace(site, quantize=None, qparams=None, moved_from=None, factors=None)
                for site in like
                for name in (site.name, site.name.rstrip("_"))
            }
            rounded = dict(plain)
        return rounded, plain

    def run(
        self,
        leaves: Sequence[Any],
        visit: Visit,
        *,
        given: Mapping[str, Tensor] | None = None,
        weights: dict[str, Tensor] | None = None,
    ) -> list[Any]:
        """Run a call, as `GraphSide.run`; with values given, it is the graph that is run.

        Values that the program gives none of are those of the graph, see `unread`.
        """
        if given is not None and self.graph is not None:
            return self.graph.run(leaves, visit, given=given, weights=weights)
        results = list(self.program.run(copied_leaves(leaves)))
        for site, value in zip(self.shown, self._read(copied_leaves(leaves)), strict=True):
            if isinstance(value, Tensor):
                visit(site, value)
        if self.graph is not None and self.unread:
            self.graph.run(leaves, lambda s, v: visit(s, v) if s.name in self.unread else None)
        return results

    def inputs_of(self, name: str, known: Mapping[str, Any]) -> set[str]:
        """The nearest known values that one depends on; none are known without a graph."""
        return set() if self.graph is None else self.graph.inputs_of(name, known)


def _clamped(rounded: Mapping[str, Site]) -> dict[str, str]:
    """By the name of what a clamp reads, the name of the clamp."""
    return {
        site.node.all_input_nodes[0].name: name
        for name, site in rounded.items()
        if is_call(site.node, CLAMPING)
    }


def _shown(
    found: Sequence[str], kept: Mapping[str, Site | None], read: RunLeaves
) -> tuple[list[Site], RunLeaves]:
    """The sites of the values that are known, and what reads these."""
    places = [at for at, name in enumerate(found) if kept[name] is not None]

    def read_known(leaves: Sequence[Any]) -> Sequence[Any]:
        values = read(leaves)
        return [values[at] for at in places]

    return [site for name in found if (site := kept[name]) is not None], read_known
