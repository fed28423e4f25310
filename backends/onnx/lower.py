"""Lowering: one walk from a canonical graph to an ONNX artifact that was run once."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import onnx_ir as ir
import onnxruntime
import torch
from onnx_ir.passes import common
from onnxscript.rewriter import _DEFAULT_REWRITE_RULES
from onnxscript.rewriter._pattern_ir import Constant
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

from pt2e_quant.accelerate.composite_operators import quick_decompositions
from pt2e_quant.accelerate.onnx_decompositions import without_idle_decompositions
from pt2e_quant.accelerate.onnx_rules import rules_at_their_operators
from pt2e_quant.accelerate.onnx_tables import kept_table
from pt2e_quant.backends.name_refused import named_node
from pt2e_quant.backends.onnx.artifact import OnnxArtifact, read_artifact
from pt2e_quant.backends.onnx.metadata import Metadata
from pt2e_quant.backends.onnx.passes.carry_state import carry_state, return_written
from pt2e_quant.backends.onnx.passes.float_forms import FLOAT_FORMS
from pt2e_quant.backends.onnx.passes.forms_by_layout import FORMS_BY_LAYOUT
from pt2e_quant.backends.onnx.passes.keep_codes import keep_codes, powers_as_bytes
from pt2e_quant.backends.onnx.passes.leave_float import (
    LeftFloat,
    leave_float,
    leave_refused,
    leave_slower,
    node_of,
)
from pt2e_quant.backends.onnx.passes.recurrent import split_left
from pt2e_quant.backends.onnx.passes.split_experts import split_experts
from pt2e_quant.backends.onnx.recipes import RECIPES
from pt2e_quant.backends.onnx.report import Refused, make_report, refused_weights
from pt2e_quant.backends.onnx.results import result_names, split_results
from pt2e_quant.backends.onnx.rewrites.pipeline import apply_rewrites
from pt2e_quant.backends.onnx.runtime import OptimizedModel, optimize
from pt2e_quant.backends.onnx.to_bytes import to_bytes
from pt2e_quant.backends.onnx.translate.translations import translation_table
from pt2e_quant.backends.onnx.validate_rewrites import RewriteValidation
from pt2e_quant.backends.onnx.value_names import (
    keep_constants,
    name_inputs,
    name_outputs,
    name_values,
    names_before,
)
from pt2e_quant.backends.quiet import without_remarks
from pt2e_quant.backends.target.float_retries import Fallback, fallback_of
from pt2e_quant.backends.target.leave_slower import slower_regions
from pt2e_quant.backends.target.lower import Draft, Job, Lowering, RuntimeOptions
from pt2e_quant.backends.target.refuse_formats import refuse_formats
from pt2e_quant.core.checksum import write_sum
from pt2e_quant.core.errors import ArtifactError, UnsupportedError
from pt2e_quant.core.provenance import RecordKind
from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.flow.reexport import export_again
from pt2e_quant.flow.report.audit import record_islands
from pt2e_quant.graph.idioms.composite import compose_idioms
from pt2e_quant.graph.idioms.masks import MASK_RULES
from pt2e_quant.graph.idioms.rms_norm import RMS_NORM_RULES
from pt2e_quant.graph.idioms.rotary_embedding import rotary_rule
from pt2e_quant.graph.idioms.shared_heads import SHARED_HEADS_RULES
from pt2e_quant.graph.pipeline import run_passes
from pt2e_quant.graph.random_draws import draws
from pt2e_quant.passes.caches.decompose_caches import decompose_caches
from pt2e_quant.passes.cleanup.drop_dead_constants import drop_dead_constants
from pt2e_quant.passes.cleanup.drop_value_checks import drop_value_checks
from pt2e_quant.passes.cleanup.join_and_split import chunk_by_sizes, promote_cats
from pt2e_quant.passes.cleanup.promote_integers import promote_integers
from pt2e_quant.passes.cleanup.simpler_overloads import name_reduced_dims, name_squeezed_dims
from pt2e_quant.passes.functions.table import FUNCTIONS
from pt2e_quant.passes.functions.write_complex import operator_of, write_complex
from pt2e_quant.passes.functions.write_functions import write_functions
from pt2e_quant.passes.qdq.widen_scales import widen_scales

OPSET = 21
"""The first with 4- and 16-bit integers in QuantizeLinear and DequantizeLinear."""

_LOCK = threading.RLock()
"""onnxscript's rules are the whole process's: one thread at a time."""


def export_model(
    ep: ExportedProgram,
    output_names: Sequence[str],
    *,
    named: Graph | None = None,
    portable: bool = False,
    validation: RewriteValidation | None = None,
) -> tuple[ir.Model, dict[str, str]]:
    """Translate a program, bring it into the form that fuses, and name its outputs.

    Args:
        ep: in canonical form, nothing packed.
        output_names: a name for each of its outputs.
        named: what the program was exported from: values get the names of its nodes.
        portable: use operators of the ONNX standard only.
        validation: is shown the model after the translation and after each rewrite.

    Returns:
        The model, and the module path of each value in it.

    Raises:
        UnsupportedError: the exporter has no ONNX for an operator.
    """
    quiet = without_remarks("torch.onnx", "onnxscript", "onnx_ir")
    with (
        quiet,
        exact_identities(),
        kept_table(),
        quick_decompositions(),
        without_idle_decompositions(),
        rules_at_their_operators(),
    ):
        try:
            program = torch.onnx.export(
                ep,
                dynamo=True,
                opset_version=OPSET,
                custom_translation_table=translation_table(),
                verbose=False,
            )
        except torch.onnx.errors.OnnxExporterError as error:
            raise UnsupportedError(
                f"torch.onnx.export cannot write this graph: {_innermost(error)}",
                fix="leave the operator out of the model, or give it a decomposition",
            ) from error
    assert program is not None
    model = program.model
    keep_constants(model.graph)
    exported = program.exported_program
    if named is not None and exported is not None:
        name_values(model, names_before(exported.graph, named))
    if validation is not None:
        assert exported is not None
        validation.start(exported.graph, model)
    origins = apply_rewrites(model, portable=portable, validation=validation)
    common.OutputFixPass()(model)
    name_outputs(model.graph, output_names)
    model.producer_name = "pt2e_quant"
    return model, origins


@contextmanager
def exact_identities() -> Iterator[None]:
    """Let onnxscript drop additions of 0 and products with 1, and none of about 0 and 1.

    onnxscript 0.7 compares with tolerances of 1e-8 and 1e-5, and so drops that in x / (y + 1e-8).
    """
    constants = [
        operand
        for rule in _DEFAULT_REWRITE_RULES
        for pattern in getattr(rule, "_target_pattern", ())
        for operand in pattern.inputs
        if isinstance(operand, Constant)
    ]
    with _LOCK, ExitStack() as restore:
        for constant in constants:
            for name in ("_abs_tol", "_rel_tol"):
                restore.callback(setattr, constant, name, getattr(constant, name))
                setattr(constant, name, 0.0)
        yield


def _innermost(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


_HAS = (
    *("aten.__rshift__.Scalar", "aten.addbmm.default", "aten.addmv.default", "aten.angle.default"),
    *("aten.bernoulli.default", "aten.dropout.default"),
    *("aten.celu.default", "aten.elu.default", "aten.selu.default"),
    *("aten.erfc.default", "aten.exp2.default", "aten.ldexp.Tensor"),
    "aten.layer_norm.default",
    *("aten.remainder.Scalar", "aten.remainder.Scalar_Tensor", "aten.remainder.Tensor"),
    *("aten.round.decimals", "aten.sort.default", "aten.special_erfcx.default"),
)
"""Functions that are not written out, because torch's exporter has ONNX for them."""


def _has_unlike(node: Node) -> bool:
    """True for a call that torch's exporter has ONNX for, which does not do what the graph does.

    ONNX's Dropout and Bernoulli of one input are one operator behind onnxscript's elimination of
    common subexpressions: two draws would give the same numbers.
    """
    return fallback_of(node) is Fallback.PLAIN or draws(node)


def _has_complex(node: Node) -> bool:
    """True if torch's exporter has ONNX for a call that reads or gives complex numbers.

    It has few functions of them, and no list: `_neg_view`, which it makes of `imag`, is not one.
    """
    name = operator_of(node)
    return name.startswith("fft_") or name in ("abs", "mul", "stft", "view_as_real")


_FIRST = (
    leave_refused,
    drop_value_checks,
    split_experts,
    decompose_caches(has_casts=True),
    promote_cats,
    promote_integers,
    name_reduced_dims,
    chunk_by_sizes,
    write_complex(_has_complex),
    write_functions(_HAS, _has_unlike, takes_sizes=False),
    name_squeezed_dims,
    *FORMS_BY_LAYOUT,
    *FLOAT_FORMS,
    split_left,
)
_IDIOMS = (*RMS_NORM_RULES, *MASK_RULES, *SHARED_HEADS_RULES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(RuntimeOptions):
    """Options of a lowering.

    Args:
        portable: use operators of the ONNX standard alone, none of ONNX Runtime's own.
    """

    portable: bool = False


def _emit(job: Job[Options]) -> Draft:
    """The model, optimized and described.

    Buffers that a call writes are inputs and outputs of the model, which the artifact carries from
    call to call. A dequantize shared by several readers is left as it is: ONNX Runtime copies it.
    """
    gm, validation, portable = job.gm, job.validation, job.options.portable
    capture = capture_of(gm)
    flat, results = split_results(gm)
    first = (leave_slower, *_FIRST) if job.options.leaves_slower(gm) else _FIRST
    changed = run_passes(flat, first, validation=validation)
    slower = slower_regions(n for r in changed if r.name == leave_slower.name for n in r.notes)
    written = return_written(flat)
    state = carry_state(flat)
    if validation is not None:
        validation.more = tuple(tensor.initial for tensor in state)
    idioms = compose_idioms(*_IDIOMS, *(() if portable else (rotary_rule(),)))
    passes = (widen_scales, keep_codes, powers_as_bytes, idioms, drop_dead_constants)
    records = run_passes(flat, passes, validation=validation)
    refuse_formats(flat, RECIPES, has_weights=True)
    names = [
        *result_names(gm, results),
        *(f"{capture.inputs[index].name}_written" for index in written),
        *(tensor.output_name for tensor in state),
    ]
    if not names:
        reason = "the model gives no tensor, and ONNX Runtime loads no model without a result"
        raise UnsupportedError(reason, node=flat.graph.output_node(), fix="return a tensor")
    rewrites = None if validation is None else RewriteValidation(validation)
    model, origins = _export(flat, names, portable=portable, validation=rewrites)
    name_inputs(model.graph, [tensor.input_name for tensor in state])
    with named_node(flat, partial(_load_part, portable=portable)):
        plain, optimized, session, left = _optimize(model, portable=portable, validation=rewrites)
    report = make_report(gm, optimized, origins)
    told = {region.node for region in slower}
    others = (one for one in left if one.result not in told)
    report.float_regions += [*slower, *(one.float_region(origins) for one in others)]
    found = (note for record in records if record.name == idioms.name for note in record.notes)
    report.notes += [f"{note.node}: {note.text}" for note in found if note.skipped]
    dropped = (n for r in changed if r.name == drop_value_checks.name for n in r.notes)
    report.notes += [f"{note.node}: {note.text}" for note in dropped]
    metadata = Metadata(
        capture=capture, results=results, report=report, state=state, written=written
    )

    def finish(_: object) -> OnnxArtifact:
        # The file's report is told of the check.
        record_islands(report, gm, optimized.real_values(products=False))
        data = _with_metadata(model, metadata, job.options.record)
        report.size_bytes = len(data)
        return OnnxArtifact(data, metadata, session=session)

    # What a new process loads needs the metadata.
    is_in_process = job.options.verify != "process"
    checked = plain if is_in_process else _with_metadata(model, metadata, RecordKind.FULL)
    return Draft(
        artifact=OnnxArtifact(checked, metadata, session=session),
        refuse=lambda: _check_refused(gm, refused_weights(optimized), origins),
        keeps_weights=any(map(fallback_of, gm.graph.nodes)),
        finish=finish,
    )


def _optimize(
    model: ir.Model, *, portable: bool, validation: RewriteValidation | None
) -> tuple[bytes, OptimizedModel, onnxruntime.InferenceSession, list[LeftFloat]]:
    """The model's bytes, what ONNX Runtime makes of it, a session, and what was left float."""
    left: list[LeftFloat] = []
    while True:
        plain = to_bytes(model)
        optimized, session = optimize(plain)
        more = leave_float(model, refused_weights(optimized), portable=portable)
        if more is None:
            return plain, optimized, session, left
        left += more
        if validation is not None:
            validation.after("leave_float", model)


def _check_refused(gm: GraphModule, refused: list[Refused], origins: Mapping[str, str]) -> None:
    if refused:
        raise ArtifactError(
            "ONNX Runtime runs in float what the op table says it runs in integers: "
            + ", ".join(f"{one.op_type} on {one.weight}" for one in refused[:5]),
            node=node_of(gm, refused[0].weight, origins),
            fix="leave the module of this node float (quantizer.set_module_name(path, None)), or "
            "lower(..., strict=False); the report lists the operators",
        )


def _export(
    flat: GraphModule,
    names: Sequence[str],
    *,
    portable: bool,
    validation: RewriteValidation | None,
) -> tuple[ir.Model, dict[str, str]]:
    """`export_model`; a refusal names the operator that the exporter has no ONNX for.

    Raises:
        UnsupportedError: naming it.
    """
    with named_node(flat, partial(_load_part, portable=portable)):
        ep = export_again(flat)
        return export_model(ep, names, named=flat.graph, portable=portable, validation=validation)


def _load_part(part: GraphModule, *, portable: bool) -> None:
    """Export a part of a graph and load it."""
    optimize(to_bytes(export_model(export_again(part), ["part"], portable=portable)[0]))


def _with_metadata(model: ir.Model, metadata: Metadata, record: RecordKind | None) -> bytes:
    model.metadata_props.update(metadata.to_properties(model.graph.initializers, record))
    return write_sum(to_bytes(model))


def _last(node: Node) -> Fallback:
    """The last fallback: functions of which ONNX's operator is inexact are written with others."""
    return Fallback.PLAIN if str(node.target) in FUNCTIONS else Fallback.FLOAT


LOWERING = Lowering(name="onnx", options=Options, emit=_emit, load=read_artifact, fallback=_last)
