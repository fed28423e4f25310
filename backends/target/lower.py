"""Lower a canonical graph to an artifact: one sequence of steps that each backend fills in."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.accelerate.pause_gc import collect_new
from pt2e_quant.backends.artifact import Artifact, Verify
from pt2e_quant.backends.gate import check_artifact, choose_sample, loader_of
from pt2e_quant.backends.measure_speed import leave_in_float, measure_speed
from pt2e_quant.backends.target.float_retries import Fallback, FloatRetries, no_fallback
from pt2e_quant.backends.validate_passes import PassValidation, validation_of
from pt2e_quant.core.canonical import verify_canonical
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.provenance import PROVENANCE_KEY, Provenance, RecordKind, provenance_of
from pt2e_quant.core.qdq import is_dequantize, is_quantize
from pt2e_quant.flow.calibrate.sample import Sample
from pt2e_quant.flow.convert.integer_reference import REFERENCE_OF_KEY
from pt2e_quant.flow.report.report import FloatRegion
from pt2e_quant.flow.report.size_ledger import check_file_smaller
from pt2e_quant.graph.op_table import ALLOWED_KEY, SLOWER
from pt2e_quant.graph.pipeline import log_passes, run_passes
from pt2e_quant.graph.subgraphs import copy_graph
from pt2e_quant.passes.cleanup.compute_in_float32 import compute_in_float32
from pt2e_quant.passes.qdq.remove_qdq import remove_qdq
from pt2e_quant.passes.weights.unpack_weights import unpack_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of every lowering; see `Backend.lower`."""

    strict: bool = True
    verify: Verify = True
    margin_db: float = 6.0
    validate: bool = False
    record: RecordKind | None = None
    measure: bool = False
    is_part: bool = False
    """Part of a graph, lowered for one sample only: its sizes need no bound."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.margin_db):
            raise ConfigError(
                f"margin_db={self.margin_db} is no margin in dB",
                fix="margin_db=6.0, less to accept more; verify=False checks nothing",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeOptions(Options):
    """Options of lowerings for runtimes whose operators were timed by class of sizes.

    Args:
        allow_slower: use integer kernels that measured much slower than float on such a CPU;
            `quantizer.allowing("slower")` does the same.
    """

    allow_slower: bool = False

    def leaves_slower(self, gm: GraphModule) -> bool:
        """True if operators of a graph that are slower in integers compute in float."""
        return not self.allow_slower and SLOWER not in gm.meta.get(ALLOWED_KEY, ())


OptionsT = TypeVar("OptionsT", bound=Options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(Generic[OptionsT]):
    """One call of `lower`.

    Args:
        gm: the canonical graph that the backend starts from; do not change it.
        options: of the call.
        validation: for `run_passes`; None if passes are not validated.
        left: operators that earlier attempts left in float; they are added to the report.
    """

    gm: GraphModule
    options: OptionsT
    validation: PassValidation | None
    left: Sequence[FloatRegion] = ()

    @property
    def unchecked(self) -> OptionsT:
        """The options for a part of the graph."""
        return replace(self.options, strict=False, verify=False, validate=False, is_part=True)


Check: TypeAlias = Callable[[Artifact], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """An artifact with its report, before the gate has run it.

    Args:
        artifact: what the gate runs.
        refuse: raises the problems that `strict` makes errors.
        finish: makes the artifact for the user; gets the gate's check, None if there was none.
        keeps_weights: weights stay float for reasons in the report, so a file that is too large is
            noted there and not refused.
    """

    artifact: Artifact
    refuse: Callable[[], None] = lambda: None
    keeps_weights: bool = False
    finish: Callable[[Check | None], Artifact] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowering(Generic[OptionsT]):
    """The parts of a backend that lower graphs and load artifacts.

    Args:
        name: of the backend.
        options: its class of options.
        emit: runs the backend's passes on a copy of the graph, writes the program and describes
            it in the report.
        load: reads a file that an artifact saved.
        prepare: the graph to start from, or a refusal.
        fallback: the last that the backend has for an operator (`fallback_of` reads it). A
            graph that is refused for one operator, or is wrong there, is lowered again with that
            operator in float.
    """

    name: str
    options: type[OptionsT]
    emit: Callable[[Job[OptionsT]], Draft]
    load: Callable[..., Artifact]
    prepare: Callable[[GraphModule, OptionsT], GraphModule] = lambda gm, _: in_float32(gm)
    fallback: Callable[[Node], Fallback] = no_fallback

    @collect_new()
    def lower(
        self, gm: GraphModule, example_inputs: Sequence[Any] | None, options: OptionsT
    ) -> Artifact:
        """Lower a canonical graph; see `Backend.lower`."""
        loader = loader_of(options.verify, self.name)
        if REFERENCE_OF_KEY in gm.meta:
            raise ConfigError(
                "this graph is an integer reference, which computes like a lowered program but is "
                "not lowered",
                fix="lower the graph that integer_reference was given",
            )
        verify_canonical(gm)
        # A copy: the caller may edit the graph later.
        quantized = None if options.is_part else copy_graph(gm)
        gm = self.prepare(gm, options)
        if options.measure and isinstance(options, RuntimeOptions) and options.leaves_slower(gm):
            tried = replace(options, strict=False, verify=False, validate=False, measure=False)
            leaves = choose_sample(gm, example_inputs).leaves
            gm = leave_in_float(gm, lambda trial: self.lower(trial, None, tried), leaves)
            quantized = copy_graph(gm)
        validation = validation_of(options.validate, gm, example_inputs)
        sample = choose_sample(gm, example_inputs) if options.verify else None
        last = no_fallback if options.is_part else self.fallback
        retries = FloatRetries(gm, last=last)
        while True:
            left = retries.regions()
            job = Job(gm=retries.gm, options=options, validation=validation, left=left)
            draft = retries.run(partial(self.emit, job))
            if draft is None:
                continue
            if options.strict:
                draft.refuse()
            draft.artifact.report.float_regions += left
            if sample is None or retries.run(partial(self._check, draft, job, sample, loader)):
                break
        check: Check | None = None
        if sample is not None:
            check = partial(check_artifact, gm=job.gm, sample=sample, margin_db=options.margin_db)
            draft.artifact.keep_figures()
        artifact = draft.artifact if draft.finish is None else draft.finish(check)
        is_strict = options.strict and not draft.keeps_weights
        check_file_smaller(artifact.report, is_strict=is_strict)
        artifact.quantized = quantized
        if options.measure:
            self._measure(artifact, gm, sample or choose_sample(gm, example_inputs), options)
        return artifact

    def _measure(
        self, artifact: Artifact, gm: GraphModule, sample: Sample, options: OptionsT
    ) -> None:
        """Time the artifact against the same program in float."""
        real = copy_graph(gm)
        real.meta[PROVENANCE_KEY] = Provenance()
        run_passes(real, (unpack_weights, remove_qdq))
        plain = replace(options, strict=False, verify=False, validate=False, measure=False)
        measure_speed(artifact, self.lower(real, None, plain), sample.leaves)

    def _check(self, draft: Draft, job: Job[OptionsT], sample: Sample, loader: str | None) -> bool:
        """True where an artifact passes its check."""
        check_artifact(
            draft.artifact,
            job.gm,
            sample,
            job.options.margin_db,
            lower_part=partial(self.lower, example_inputs=None, options=job.unchecked),
            loader=loader,
        )
        return True


def in_float32(gm: GraphModule) -> GraphModule:
    """The graph itself, or a copy in float32 if its q/dq take or give another float dtype.

    Runtimes crash the process at such q/dq. The copy's provenance records the change.
    """
    if not any(_is_other_float(node) for node in gm.graph.nodes):
        return gm
    made = copy_graph(gm)
    table = provenance_of(gm)
    made.meta[PROVENANCE_KEY] = replace(table, notes=[*table.notes], passes=[*table.passes])
    log_passes(provenance_of(made), run_passes(made, (compute_in_float32((torch.float32,)),)))
    return made


def _is_other_float(node: Node) -> bool:
    """True if a node is a q/dq whose real numbers are in another dtype than float32."""
    real = node.args[0] if is_quantize(node) else node if is_dequantize(node) else None
    value = real.meta.get("val") if isinstance(real, Node) else None
    return isinstance(value, Tensor) and value.dtype is not torch.float32
