"""Lowering: one walk from a canonical graph to oneDNN's fused operators, and its report."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.fx import GraphModule, Node

from pt2e_quant.backends.artifact import Artifact
from pt2e_quant.backends.cpu.artifact import CpuArtifact
from pt2e_quant.backends.cpu.failed_products import (
    Failure,
    deciding_without,
    find_failures,
    hold_weights,
)
from pt2e_quant.backends.cpu.leave_saturating import leave_saturating
from pt2e_quant.backends.cpu.passes.module_passes import (
    fold_packing,
    reshape_views,
    write_sums_in_place,
)
from pt2e_quant.backends.cpu.passes.pack_recurrent import pack_recurrent
from pt2e_quant.backends.cpu.passes.single_pass_qdq import FULL_RANGES, single_pass_qdq
from pt2e_quant.backends.cpu.recipes import RECIPES
from pt2e_quant.backends.cpu.table import REGISTRY, decide
from pt2e_quant.backends.edited_copy import edited_copy
from pt2e_quant.backends.fuse_kernels import KERNEL_KEY, REFUSED_KEY, fuse_kernels
from pt2e_quant.backends.program_file import StoredProgram, read_program, write_program
from pt2e_quant.backends.target.float_retries import Fallback
from pt2e_quant.backends.target.lower import Draft, Job, Lowering
from pt2e_quant.backends.target.lower import Options as AnyOptions
from pt2e_quant.backends.target.recipe import Wanted
from pt2e_quant.backends.target.refuse_formats import refuse_formats
from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.core.qdq import is_dequantize, is_qdq
from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.flow.report.report import FloatRegion, Report
from pt2e_quant.graph.op_table import operator_name
from pt2e_quant.graph.ops import LINEAR, is_call
from pt2e_quant.graph.pipeline import GraphPass, Validation, run_passes
from pt2e_quant.graph.subgraphs import NamedGraph, named_graphs
from pt2e_quant.kernels.cost import moved_bytes
from pt2e_quant.kernels.kernel import Kernel
from pt2e_quant.kernels.onednn.speed import SHAPE_CLASS_KEY, cpu_slug, kernel_cpu, measured_here
from pt2e_quant.kernels.product_trial.verdicts import TRIALS_VARIABLE, are_tried
from pt2e_quant.kernels.quantize_per_token.fuse_choose import fuse_choose_quantize
from pt2e_quant.kernels.read_scheme import scheme_of
from pt2e_quant.kernels.registry import Registry
from pt2e_quant.passes.cleanup.drop_dead_constants import drop_dead_constants
from pt2e_quant.passes.cleanup.lift_constants import lift_constants
from pt2e_quant.passes.cleanup.strip_guards import strip_guards
from pt2e_quant.passes.qdq.duplicate_dequantize import duplicate_dequantize
from pt2e_quant.passes.qdq.shift_activations import unsigned_activations
from pt2e_quant.passes.qdq.widen_scales import widen_scales

SUFFIX = ".qpt2"
UNFUSED_WEIGHT = "dequantize of a weight"

MODULE_PASSES: tuple[GraphPass, ...] = (
    write_sums_in_place,
    fold_packing,
    pack_recurrent,
    single_pass_qdq,
    drop_dead_constants,
)
"""Passes from a program that any tool of torch takes to the module that runs by itself."""

_UNTRIED = f"trials are off (`without_trials()`, or {TRIALS_VARIABLE} in the environment)"


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
    """Options of a lowering.

    Args:
        registry: the kernels.
        tries: try each distinct product that this machine has not yet tried, in a child process.
    """

    registry: Registry = REGISTRY
    tries: bool = True


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
    """
    stored = read_program(path, "cpu", SUFFIX)
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
    report = stored.report("oneDNN")
    gm, saturating = leave_saturating(stored.gm)
    report.float_regions.extend(saturating)
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


LOWERING = Lowering(
    name="cpu",
    options=Options,
    emit=_emit,
    load=load,
    fallback=lambda _: Fallback.FLOAT,
)


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


def describe(report: Report, program: GraphModule, module: GraphModule) -> None:
    """Count what runs, and say which q/dq are left, why, and what each moves in a call.

    Args:
        report: written to.
        program: the fused graph, its q/dq as the canonical graph has them.
        module: what runs, with those replaced by faster forms.
    """
    counts: Counter[str] = Counter()
    floats: Counter[str] = Counter()
    for node in (node for graph in named_graphs(module) for node in graph.gm.graph.nodes):
        if node.op != "call_function":
            continue
        name = operator_name(node)
        is_fused = KERNEL_KEY in node.meta or name.startswith("quantized.")
        (counts if is_fused or _gives_integers(node) else floats)[name] += 1
    report.integer_ops, report.float_ops = dict(counts), dict(floats)
    graphs = named_graphs(program)
    report.float_regions.extend(
        float_region for graph in graphs for float_region in _float_regions(graph)
    )
    lone = [n for graph in graphs for n in graph.gm.graph.nodes if is_qdq(n)]
    quantizes = sum(not is_dequantize(n) for n in lone)
    moved = sum(_moved(n) for n in lone)
    size = f"{moved:,} bytes" if type(moved) is int else f"{moved} bytes"
    report.notes.append(
        f"{quantizes} quantize and {len(lone) - quantizes} dequantize passes left: "
        f"{size} in every call" + (", one round of each loop counted" if len(graphs) > 1 else "")
    )
    report.notes.extend(_speeds(graphs))


def _float_regions(graph: NamedGraph) -> list[FloatRegion]:
    """The weights of one graph that are dequantized in every call."""
    refused: dict[str, str] = graph.gm.meta.get(REFUSED_KEY, {})
    return [
        FloatRegion(
            node=graph.prefix + (reader := next(iter(node.users)).name),
            what=UNFUSED_WEIGHT,
            reason=refused.get(reader, "no fused operator takes it"),
            cost="one pass over the weight in every call",
        )
        for node in graph.gm.graph.nodes
        if is_dequantize(node) and node.args[0] in graph.constants and node.users
    ]


def _moved(node: Node) -> int:
    source = node.args[0]
    assert isinstance(source, Node)
    return moved_bytes(source.meta["val"], node.meta["val"])


def _speeds(graphs: Sequence[NamedGraph]) -> list[str]:
    """The measured speed over float of every operator's shape class in use, or that none is."""
    found: Counter[tuple[str, str]] = Counter()
    others: Counter[str] = Counter()
    for node in (node for graph in graphs for node in graph.gm.graph.nodes):
        kernel: Kernel | None = node.meta.get(KERNEL_KEY)
        if kernel is not None and SHAPE_CLASS_KEY in node.meta:
            found[kernel.op, node.meta[SHAPE_CLASS_KEY]] += 1
        elif kernel is not None and not kernel.measured:
            others[kernel.op] += 1
    return [_speed(op, name, count) for (op, name), count in sorted(found.items())] + [
        f"{op}: not measured on a CPU ({count} calls)" for op, count in others.items()
    ]


def _speed(op: str, shape_class: str, count: int) -> str:
    calls = "1 call" if count == 1 else f"{count} calls"
    what = f"{op}, {shape_class or 'symbolic sizes'} ({calls})"
    ratio = measured_here(op).get(shape_class)
    if ratio is None:
        return f"{what}: not measured on {cpu_slug()}"
    cpu = kernel_cpu(op)
    where = cpu if cpu == cpu_slug() else f"{cpu}, the most like {cpu_slug()} that was measured"
    kept = "; kept, its tensors are quantized already" if ratio < 1.0 else ""
    return f"{what}: measured {ratio:.2f} times as fast as float on {where}{kept}"


def _gives_integers(node: Node) -> bool:
    return getattr(node.meta.get("val"), "dtype", None) in FULL_RANGES
