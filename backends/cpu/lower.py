"""Lowering: one walk from a canonical graph to oneDNN's fused operators."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.fx import GraphModule, Node

from pt2e_quant.backends.artifact import Artifact
from pt2e_quant.backends.cpu.artifact import CpuArtifact
from pt2e_quant.backends.cpu.describe import UNFUSED_WEIGHT, describe
from pt2e_quant.backends.cpu.failed_products import (
    Failure,
    deciding_without,
    find_failures,
    hold_weights,
)
from pt2e_quant.backends.cpu.passes.module_passes import (
    fold_packing,
    reshape_views,
    write_sums_in_place,
)
from pt2e_quant.backends.cpu.passes.pack_recurrent import pack_recurrent
from pt2e_quant.backends.cpu.passes.single_pass_qdq import single_pass_qdq
from pt2e_quant.backends.cpu.recipes import RECIPES
from pt2e_quant.backends.cpu.table import REGISTRY
from pt2e_quant.backends.edited_copy import edited_copy
from pt2e_quant.backends.fuse_kernels import fuse_kernels
from pt2e_quant.backends.program_file import StoredProgram, read_program, write_program
from pt2e_quant.backends.target.float_retries import Leave
from pt2e_quant.backends.target.lower import Draft, Job, Lowering, in_float32
from pt2e_quant.backends.target.lower import Options as AnyOptions
from pt2e_quant.backends.target.recipe import Wanted
from pt2e_quant.backends.target.refuse_formats import refuse_formats
from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.core.qdq import is_dequantize
from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.core.schemes import Role
from pt2e_quant.flow.report.report import FloatRegion, Report
from pt2e_quant.graph.op_table import Slot
from pt2e_quant.graph.ops import LINEAR, is_call
from pt2e_quant.graph.pattern import Match
from pt2e_quant.graph.pipeline import GraphPass, Validation, run_passes
from pt2e_quant.graph.subgraphs import named_graphs
from pt2e_quant.kernels.kernel import Kernel
from pt2e_quant.kernels.onednn.exact_products import onednn_is_exact
from pt2e_quant.kernels.product_trial.verdicts import TRIALS_VARIABLE, are_tried
from pt2e_quant.kernels.quantize_per_token.fuse_choose import fuse_choose_quantize
from pt2e_quant.kernels.quantized_values import affine_of, read_weight, requantized
from pt2e_quant.kernels.read_scheme import scheme_of, slots_fit
from pt2e_quant.kernels.registry import Registry
from pt2e_quant.passes.cleanup.drop_dead_constants import drop_dead_constants
from pt2e_quant.passes.cleanup.lift_constants import lift_constants
from pt2e_quant.passes.cleanup.strip_guards import strip_guards
from pt2e_quant.passes.qdq.duplicate_dequantize import duplicate_dequantize
from pt2e_quant.passes.qdq.shift_activations import unsigned_activations
from pt2e_quant.passes.qdq.widen_scales import widen_scales

SUFFIX = ".qpt2"

MODULE_PASSES: tuple[GraphPass, ...] = (
    write_sums_in_place,
    fold_packing,
    pack_recurrent,
    single_pass_qdq,
    drop_dead_constants,
)
"""From a program that any tool of torch takes to the module that runs by itself."""

_UNTRIED = f"trials are off (`without_trials()`, or {TRIALS_VARIABLE} in the environment)"
_FIX = 'quantize with recipe "int8_reduced", whose sums are exact on any CPU'


def lowering_passes(registry: Registry, failures: Sequence[Failure]) -> tuple[GraphPass, ...]:
    """The passes of a lowering to a program, in order."""
    return (
        strip_guards,
        widen_scales,
        unsigned_activations,
        fuse_choose_quantize,
        duplicate_dequantize,
        fuse_kernels(registry, deciding_without(decide, failures), output=torch.uint8),
        hold_weights(failures),
        reshape_views,
        drop_dead_constants,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(AnyOptions):
    """How to lower.

    Args:
        registry: the kernels.
        tries: try each distinct product that this machine has not yet tried, in a child process.
    """

    registry: Registry = REGISTRY
    tries: bool = True


def _start(gm: GraphModule, options: Options) -> GraphModule:
    gm = in_float32(gm)
    _refuse_saturation(gm)
    return gm


def _emit(job: Job[Options]) -> Draft:
    options, stored = job.options, write_program(job.gm, "cpu", record=job.options.record)
    artifact = _assemble(stored, options.registry, tries=options.tries, validation=job.validation)

    def refuse() -> None:
        refuse_formats(artifact.program, RECIPES, has_caches=True)
        weights = [i for i in artifact.report.float_regions if i.what == UNFUSED_WEIGHT]
        if weights:
            raise unfused_weights(artifact.program, weights)

    def finish(check: Callable[[Artifact], None] | None) -> CpuArtifact:
        artifact.check = check
        return artifact

    return Draft(artifact=artifact, refuse=refuse, finish=finish)


def load(path: str | Path, *, registry: Registry = REGISTRY, tries: bool = True) -> CpuArtifact:
    """Read a file that an artifact of this backend saved, and pack its weights for this machine.

    Raises:
        ArtifactError: the file is missing, damaged or not one of ours.
        UnsupportedError: sums would saturate on this machine.
    """
    stored = read_program(path, "cpu", SUFFIX)
    _refuse_saturation(stored.gm)
    artifact = _assemble(stored, registry, tries=tries)
    artifact.quantized = stored.gm
    return artifact


def _assemble(
    stored: StoredProgram,
    registry: Registry,
    *,
    tries: bool,
    validation: Validation | None = None,
) -> CpuArtifact:
    gm = stored.gm
    report = stored.report("oneDNN")
    is_tried = tries and are_tried()
    program = _tried_graph(gm, registry, report, tries=is_tried, validation=validation)
    module = make_module(program, validation)
    describe(report, program, module)
    return CpuArtifact(program, module, stored.data, capture_of(gm), report)


def lower_graph(
    gm: GraphModule,
    registry: Registry = REGISTRY,
    failures: Sequence[Failure] = (),
    validation: Validation | None = None,
) -> GraphModule:
    """The fused program of a canonical graph, which is not changed; its weights are plain integers.

    Any tool of torch takes the result: export, files, Inductor. Called as it is, it packs its
    weights in every call; `make_module` packs them once.

    Args:
        gm: the canonical graph.
        registry: the kernels.
        failures: kernels that are not to be used, and where.
        validation: is shown the graph between passes.
    """
    program = edited_copy(gm, lowering_passes(registry, failures), validation=validation)
    run_passes(program, (lift_constants,))
    return program


def _tried_graph(
    gm: GraphModule,
    registry: Registry,
    report: Report,
    *,
    tries: bool,
    validation: Validation | None,
) -> GraphModule:
    """The fused program without the products that are wrong here, which go to the report.

    Where a wide pattern fails, narrower ones take its place, and are tried as well.
    """
    failures: tuple[Failure, ...] = ()
    while True:
        program = lower_graph(gm, registry, failures, validation)
        found, untried = find_failures(program) if tries else ((), _UNTRIED)
        if not found:
            break
        failures += found
    report.float_regions.extend(failure.float_region for failure in failures)
    if untried:
        report.notes.append(f"products were not tried on this machine: {untried}")
    return program


def make_module(program: GraphModule, validation: Validation | None = None) -> GraphModule:
    """The fastest form without a compiler: packed weights, sums in place, single-pass q/dq."""
    return opaque_to_compile(edited_copy(program, MODULE_PASSES, validation=validation))


def _refuse_saturation(gm: GraphModule) -> None:
    """Refuse 8-bit activations where oneDNN's sums of products saturate.

    Raises:
        UnsupportedError: naming the first such activation.
    """
    for node in (node for graph in named_graphs(gm) for node in graph.gm.graph.nodes):
        affine = affine_of(node) if is_dequantize(node) else None
        if affine is None or affine.dtype not in (torch.uint8, torch.int8):
            continue
        if affine.quant_max + (128 if affine.dtype is torch.int8 else 0) > 127:
            if onednn_is_exact():
                return
            raise UnsupportedError(
                "this machine's oneDNN saturates sums of 8-bit products (it has no VNNI, or "
                "ONEDNN_MAX_CPU_ISA hides it)",
                node=node,
                fix=_FIX,
            )


LOWERING = Lowering(
    name="cpu",
    options=Options,
    prepare=_start,
    emit=_emit,
    load=load,
    leaves=lambda _: Leave.INTEGERS,
)


def decide(gm: GraphModule, refused: dict[str, str]) -> Callable[[Kernel, Match], bool]:
    """A predicate for the matcher; why a match that fits is left goes to `refused`, by node."""
    return lambda kernel, match: _fits(gm, kernel, match, refused)


def _fits(gm: GraphModule, kernel: Kernel, match: Match, refused: dict[str, str]) -> bool:
    """Whether the q/dq around a match are the row's; why one that fits is left goes to `refused`.

    Ranges narrower than the row's, or of weights that use -128, are taken: what a foreign
    quantizer wrote runs too.
    """
    row = kernel.row
    takes_floats = any(slot.role is Role.INPUT and not slot.accepts for slot in row.slots)
    if takes_floats and not slots_fit(gm, row, match):
        return False
    if not takes_floats and not all(_slot_fits(gm, match, slot) for slot in row.slots):
        return False
    broken = row.refusal(match)
    if broken is not None:
        refused.setdefault(match.anchor.name, f"{kernel.op} needs {broken.text}")
    return broken is None


def _slot_fits(gm: GraphModule, match: Match, slot: Slot) -> bool:
    at, role = slot.at, slot.role
    if any(accepted.is_dynamic for accepted in slot.accepts):
        found = scheme_of(gm, match[at])
        return found is not None and any(found.fits(accepted) for accepted in slot.accepts)
    if role is Role.WEIGHT:
        return match[at] is None or read_weight(gm, match[at]) is not None
    if role is Role.OUTPUT:
        written = requantized(match.anchor)
        return written is not None and written[0].dtype is torch.uint8
    if at == "y":  # a summand may be float
        return isinstance(match[at], Node)
    value = match[at]
    sources = value if isinstance(value, tuple) else (value,)
    affines = [affine_of(source) for source in sources]
    return all(affine is not None and affine.dtype is torch.uint8 for affine in affines)


def opaque_to_compile(module: GraphModule) -> GraphModule:
    """Let `torch.compile` of a model around a module call it instead of tracing into it.

    Dynamo knows no quantized tensors (`int_repr`), and Inductor asks for oneDNN's packed weights as
    constants, which they are under `freezing` alone. A program (`CpuArtifact.program`) is traced.

    Args:
        module: is changed: its forward is marked.

    Returns:
        The module itself.
    """
    call = torch.compiler.disable(module.forward, reason="its weights are packed for oneDNN")  # type: ignore[no-untyped-call]  # torch's own
    setattr(module, "forward", call)  # noqa: B010  # an attribute of this module, not of its class
    return module


def unfused_weights(program: GraphModule, weights: Sequence[FloatRegion]) -> UnsupportedError:
    """The error for weights that would be dequantized in every call.

    Args:
        program: the fused one.
        weights: what is left in it, at least one.
    """
    first = weights[0]
    graph, reader = next(
        (graph.gm, node)
        for graph in named_graphs(program)
        for node in graph.gm.graph.nodes
        if graph.prefix + node.name == first.node
    )
    nearest = ""
    for source in reader.all_input_nodes if is_call(reader, LINEAR) else []:
        scheme = scheme_of(graph, source)
        if scheme is None:
            continue
        wanted = Wanted.of_weight(scheme)
        nearest = f'the nearest recipe it runs is "{RECIPES.nearest(wanted)}"; or '
    return UnsupportedError(
        f"oneDNN has no fused operator for the quantized weight of {first.node}"
        + (f" and {len(weights) - 1} more" if len(weights) > 1 else "")
        + f": {first.reason}",
        node=reader,
        fix=f"{nearest}lower(..., strict=False) to dequantize it in every call",
    )
