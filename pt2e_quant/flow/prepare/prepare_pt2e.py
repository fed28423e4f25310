"""prepare: annotate a captured graph and put one observer per qparam group into it."""

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from pt2e_quant.accelerate.pause_gc import pause_gc
from pt2e_quant.accelerate.recompile import recompile
from pt2e_quant.core.effort import Effort, effort_named
from pt2e_quant.core.errors import ConfigError, Pt2eQuantWarning
from pt2e_quant.core.export import warn_of_merged_inputs
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.core.read_capture import CAPTURE_KEY, rebuild_capture
from pt2e_quant.core.unlift import graph_module_of
from pt2e_quant.flow.annotate.check_specs import (
    check_annotations,
    nothing_quantized,
    watch_annotations,
)
from pt2e_quant.flow.annotate.table_quantizer import TableQuantizer
from pt2e_quant.flow.prepare.input_check import install_input_check
from pt2e_quant.flow.prepare.insert_observers import insert_observers, may_hold
from pt2e_quant.flow.prepare.note_folded import constants_read, note_folded
from pt2e_quant.flow.prepare.prepared import (
    PREPARED_KEY,
    PreparedState,
    prepared_graphs,
    prepared_state,
)
from pt2e_quant.flow.qat.train_mode import allow_exported_model_train_eval
from pt2e_quant.flow.report.audit import refuse_left_float
from pt2e_quant.graph.alias import mutated_buffers
from pt2e_quant.graph.editor import DEFER_RECOMPILE
from pt2e_quant.graph.op_table import ALLOWED_KEY, SLOWER
from pt2e_quant.graph.pickling.pickle_module import make_picklable
from pt2e_quant.graph.pipeline import GraphPass, log_passes, one_recompile, run_passes
from pt2e_quant.graph.subgraphs import BODY_KEY, copy_bodies, direct_bodies
from pt2e_quant.passes.algorithms.algorithm import Algorithm, as_pass, insert_statistics
from pt2e_quant.passes.algorithms.registry import algorithm_named, combined, with_effort
from pt2e_quant.passes.batch_norm.detach_batch_norm import (
    DetachedNorm,
    attach_batch_norms,
    detach_batch_norms,
)
from pt2e_quant.passes.batch_norm.expanded_conv_bn import expand_conv_bn
from pt2e_quant.passes.batch_norm.fold_affines_ahead import FOLD_AFFINES
from pt2e_quant.passes.batch_norm.fold_batch_norm import fold_batch_norm
from pt2e_quant.passes.cleanup.compute_in_float32 import compute_in_float32
from pt2e_quant.passes.cleanup.drop_dead_constants import drop_dead_constants
from pt2e_quant.passes.cleanup.fold_constants import fold_constants, fold_layer_constants
from pt2e_quant.passes.cleanup.inline_regions import inline_regions
from pt2e_quant.passes.cleanup.linear_forms import einsums_as_linears, vectors_as_rows
from pt2e_quant.passes.cleanup.naming import NAMING_PASSES
from pt2e_quant.passes.cleanup.remove_dropout import (
    DetachedDropout,
    attach_dropouts,
    detach_dropouts,
    remove_dropout,
)
from pt2e_quant.passes.cleanup.remove_identities import remove_identities
from pt2e_quant.passes.cleanup.simpler_overloads import keep_squeezed_ranks
from pt2e_quant.passes.cleanup.sink_constants import sink_constants
from pt2e_quant.passes.cleanup.strip_guards import strip_guards
from pt2e_quant.passes.mutation.functionalize_activations import functionalize_activations

PREPARE_PASSES: tuple[GraphPass, ...] = (
    strip_guards,
    inline_regions,
    sink_constants,
    functionalize_activations,
    *NAMING_PASSES,
    remove_dropout,
    remove_identities,
    keep_squeezed_ranks,
    vectors_as_rows,
    fold_constants,
    einsums_as_linears,
    fold_batch_norm,
    *FOLD_AFFINES,
    drop_dead_constants,
)
"""The passes that run before a quantizer sees a graph, in this order."""
QAT_PASSES: tuple[GraphPass, ...] = (
    strip_guards,
    sink_constants,
    functionalize_activations,
    *NAMING_PASSES,
    keep_squeezed_ranks,
    vectors_as_rows,
)
"""The passes for training. They leave out passes that compute from trained parameters once, that
let gradients through where the model stops them, or that fold affines into other weights."""


def prepare_pt2e(
    model: ExportedProgram | GraphModule,
    quantizer: Any,
    *,
    algorithms: Sequence[str | Algorithm] = (),
    effort: str | None = None,
    strict: bool = True,
    int_only: bool = False,
) -> GraphModule:
    """Annotate a captured graph and insert observers.

    Constants get none where only convert needs their qparams (`insert_observers.may_hold`):
    convert observes each once.

    Args:
        model: of torch.export.export, or its `.module()`, which is edited in place. The
            tensors of the user's model are shared and never written.
        quantizer: ours, or any object with PT2E's `transform_for_annotation`, `annotate` and
            `validate`.
        algorithms: what is to be done to weights and ranges besides, by name or with settings:
            `["gptq"]`, `[Gptq(block_size=64)]`; added to those that the quantizer brings.
        effort: "fast" takes ranges of activations as they were observed, the nearest integers for
            weights, and biases as they are; "balanced" and "best" compare others in convert, on
            calls that calibration keeps, and correct biases. "best" chooses integers by the whole
            Hessian and re-estimates batch norms, if the model gains by it. None is "balanced" for
            recipes with static ranges where nobody chose the observers, else "fast".
        strict: refuse when nothing was annotated; otherwise warn, here and in convert.
        int_only: refuse operators that compute in float between the first quantize and the last
            dequantize: here those that the quantizer leaves float or that have no integer form, in
            convert whatever `audit` finds.

    Returns:
        A graph module to run calibration data through, with the model's own call signature.

    Raises:
        ConfigError: the model or the quantizer is something else, or an algorithm that was asked
            for applies to nothing in this graph.
        AnnotationError: an annotation cannot be carried out, or there is none.
        UnsupportedError: int_only, and an operator computes in float.
    """
    prepared = prepare_captured(
        captured(model),
        quantizer,
        strict=strict,
        algorithms=algorithms,
        effort=None if effort is None else effort_named(effort),
        int_only=int_only,
    )
    if int_only:
        for graph in prepared_graphs(prepared):
            refuse_left_float(graph)
            prepared_state(graph).int_only = True
            # A chip without float has no use for what is faster in float on this machine.
            graph.meta[ALLOWED_KEY] = {*graph.meta.get(ALLOWED_KEY, ()), SLOWER}
    return prepared


def prepare_captured(
    gm: GraphModule,
    quantizer: Any,
    *,
    strict: bool,
    algorithms: Sequence[str | Algorithm] = (),
    effort: Effort | None = None,
    int_only: bool = False,
    is_qat: bool = False,
    observe_constants: bool = False,
    as_torchao: bool = False,
) -> GraphModule:
    """Prepare a graph in place for calibration, or with is_qat for training.

    With observe_constants the graph observes constants too, as that of torchao's PT2E does. With
    as_torchao the quantizer sees batch norms in training, which become operators as there, and
    convert gives graphs of that form.
    """
    if not callable(getattr(quantizer, "annotate", None)):
        raise ConfigError(
            f"a quantizer has an `annotate` method, {type(quantizer).__name__} has none",
            fix='pt2e_quant.backends.get("xnnpack").quantizer("int8")',
        )
    with pause_gc():
        brought = () if is_qat else getattr(quantizer, "algorithms", ())
        brought = tuple(a for a in brought if not (int_only and a.needs_float))
        named = {algorithm_named(given).name for given in algorithms}
        named |= getattr(quantizer, "asked_algorithms", set())
        own, algorithms = with_effort(brought, algorithms, effort)
        asked = named | {algorithm_named(given).name for given in algorithms}
        options = _Options(
            strict=strict,
            is_qat=is_qat,
            observe_constants=observe_constants,
            as_torchao=as_torchao,
            algorithms=combined(own, algorithms),
            asked=tuple(sorted(asked)),
            # An effort may name what the recipe does anyway, also where that finds nothing to do.
            required=frozenset(asked - ({algorithm.name for algorithm in brought} - named)),
        )
        prepared = _prepare(gm, quantizer, options)
        _check_reached(prepared, options)
        return prepared


def _check_reached(gm: GraphModule, options: "_Options") -> None:
    """Refuse an algorithm that was asked for and has no site; note one whose sites another took."""
    takers = [a.name for a in options.algorithms if a.name in options.applied and a.needs_float]
    for algorithm in options.algorithms:
        if algorithm.name in options.required - options.reached:
            if takers:
                left = f"{algorithm.name}: {takers[0]} left it no {algorithm.fits}"
                provenance_of(gm).notes.append(left)
                continue
            raise ConfigError(
                f"{algorithm.name} applies to nothing that is quantized here: it is for "
                f"{algorithm.fits}",
                fix="leave it out, or choose a recipe or scheme that quantizes such operators",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """Options of the preparation.

    `required` are the names of the algorithms that have to find a site, `reached` takes those that
    found one, `applied` those of algorithms without data that changed one.
    """

    strict: bool
    is_qat: bool
    observe_constants: bool
    as_torchao: bool
    algorithms: tuple[Algorithm, ...]
    asked: tuple[str, ...]
    required: frozenset[str]
    reached: set[str] = field(default_factory=set)
    applied: set[str] = field(default_factory=set)


def _prepare(gm: GraphModule, quantizer: Any, options: _Options) -> GraphModule:
    capture = rebuild_capture(gm, mutated_buffers(gm))
    _choose_dtypes(gm, quantizer, options)
    gm = _prepare_graph(gm, quantizer, options)
    gm.meta[CAPTURE_KEY] = capture
    install_input_check(gm)
    allow_exported_model_train_eval(gm)
    for graph in prepared_graphs(gm):
        make_picklable(graph)
    states = [prepared_state(graph) for graph in prepared_graphs(gm)]
    if not any(state.observer_infos or state.constants for state in states):
        error = nothing_quantized(gm)
        # What could be quantized and is better in float runs in float: that is no failure.
        is_choice = any(record.is_choice for record in provenance_of(gm).floats)
        if options.strict and not is_choice:
            raise error
        warnings.warn(str(error), Pt2eQuantWarning, stacklevel=3)
    return gm


def _choose_dtypes(gm: GraphModule, quantizer: Any, options: _Options) -> None:
    """Change dtypes that the backend of a quantizer has no kernels for to float32.

    Before anything is folded, so that nothing is folded in half precision.
    """
    kept = getattr(quantizer, "computes_in", None)
    if kept is None:
        return
    before = (strip_guards,) if options.is_qat else (strip_guards, inline_regions)
    records = run_passes(gm, (*before, compute_in_float32(kept)))
    log_passes(provenance_of(gm), records[-1:])


def _prepare_graph(gm: GraphModule, quantizer: Any, options: _Options) -> GraphModule:
    """Prepare one graph, then the bodies of its control flow, which have constants of their own."""
    with one_recompile(gm) as changes:
        constants = constants_read(gm)
        records = run_passes(gm, _passes(options, quantizer))
        note_folded(gm, constants)
        gm = _transformed(gm, quantizer)
        taken = (
            remove_training_ops(gm, expands=options.as_torchao)
            if options.is_qat
            else RemovedTrainingOps()
        )
        # A table's matches do not overlap.
        is_table = type(quantizer) is TableQuantizer
        with nullcontext() if is_table else watch_annotations(gm, strict=options.strict):
            quantizer.annotate(gm)
        quantizer.validate(gm)
        check_annotations(gm)
        _run_without_data(gm, options)
        taken.put_norms_back(gm)
        changes.clear()  # inserting the observers ends with a recompile
    provenance = provenance_of(gm)
    provenance.quantizer = provenance.quantizer or type(quantizer).__name__
    provenance.passes += [record.name for record in records if record.changed]
    state = PreparedState(
        algorithms=tuple(a for a in options.algorithms if a.runs_in_convert),
        asked_algorithms=options.asked,
        finishing=tuple(getattr(quantizer, "finishing", ())),
        placing=tuple(getattr(quantizer, "placing", ())),
        is_strict=options.strict,
        is_qat=options.is_qat,
        as_torchao=options.as_torchao,
    )
    gm.meta[PREPARED_KEY] = state
    holds = may_hold(quantizer, state) and not options.observe_constants
    insert_observers(gm, quantizer, state, taken.sources, holds=holds)
    options.reached.update(insert_statistics(gm, state.algorithms))
    taken.put_dropouts_back(gm)
    recompile(gm)
    for body in direct_bodies(gm):
        body.gm.meta[BODY_KEY] = body.name
        owner, _, leaf = body.name.rpartition(".")
        setattr(gm.get_submodule(owner), leaf, _prepare_graph(body.gm, quantizer, options))
    return gm


def _run_without_data(gm: GraphModule, options: _Options) -> None:
    """Run the algorithms that need no data, on the annotated graph."""
    passes = [as_pass(a) for a in options.algorithms if not a.runs_in_convert]
    records = run_passes(gm, passes)
    log_passes(provenance_of(gm), records)
    options.reached.update(record.name for record in records if record.notes)
    options.applied.update(r.name for r in records if not all(n.skipped for n in r.notes))


def _passes(options: _Options, quantizer: Any) -> tuple[GraphPass, ...]:
    passes = QAT_PASSES if options.is_qat else PREPARE_PASSES
    if getattr(quantizer, "keeps_weights", False):
        # Codes go back to where the model reads the weight, which still multiplies it there.
        own = (fold_constants, fold_batch_norm, *FOLD_AFFINES)
        return tuple(p for p in passes if p not in own)
    if not options.as_torchao:
        return passes
    # Other constants than those of layers stay as the model computes them, and where it does.
    own = (*NAMING_PASSES, *FOLD_AFFINES, einsums_as_linears)
    return tuple(fold_layer_constants if p is fold_constants else p for p in passes if p not in own)


def _transformed(gm: GraphModule, quantizer: Any) -> GraphModule:
    """The graph after the quantizer's own passes: edited in place, or a new one (Arm's retrace)."""
    made: GraphModule = quantizer.transform_for_annotation(gm) or gm
    if made is not gm:
        run_passes(made, (strip_guards,))  # exporting anew makes new ones
        # Copied with the rest of `meta`; no later step would remove it.
        made.meta.pop(DEFER_RECOMPILE, None)
    return made


def captured(model: ExportedProgram | GraphModule) -> GraphModule:
    """The graph module of a captured program.

    Raises:
        ConfigError: it is something else.
    """
    if isinstance(model, ExportedProgram):
        warn_of_merged_inputs(model)
        gm = graph_module_of(model)
        copy_bodies(gm)
        return gm
    if isinstance(model, GraphModule):
        return model
    raise ConfigError(
        f"prepare_pt2e takes a captured program, found {type(model).__name__}",
        fix="torch.export.export(model.eval(), example_inputs)",
    )


@dataclass(slots=True)
class RemovedTrainingOps:
    """Training-only batch norms and dropouts of one graph, removed during annotation.

    Args:
        norms: as they were.
        dropouts: as they were.
        expands: batch norms stay in sight, and those behind convs are written out as operators.
        sources: once the batch norms are back, folded weights and biases with their constants.
    """

    norms: list[DetachedNorm] = field(default_factory=list)
    dropouts: list[DetachedDropout] = field(default_factory=list)
    expands: bool = False
    sources: dict[Node, Node] = field(default_factory=dict)

    def put_norms_back(self, gm: GraphModule) -> None:
        """After annotation: observers go around the batch norms."""
        self.sources = expand_conv_bn(gm) if self.expands else attach_batch_norms(gm, self.norms)

    def put_dropouts_back(self, gm: GraphModule) -> None:
        """After the observers are in: dropout reads what they hand on."""
        attach_dropouts(gm, self.dropouts)


def remove_training_ops(gm: GraphModule, *, expands: bool = False) -> RemovedTrainingOps:
    """Take out every batch norm behind a conv or linear, and every dropout.

    Args:
        gm: the graph module.
        expands: leave the batch norms for a quantizer that annotates them, as torchao's do.
    """
    norms = [] if expands else detach_batch_norms(gm)
    return RemovedTrainingOps(norms=norms, dropouts=detach_dropouts(gm), expands=expands)
