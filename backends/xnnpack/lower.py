"""Canonical graph to `.pte`: passes, ExecuTorch's own lowering, the check, the report."""

import warnings
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass, field
from functools import partial

# Registers the out variants of the quantized operators that a program may call.
import executorch.kernels.quantized  # noqa: F401
import torch
from executorch.exir import EdgeProgramManager, ExecutorchBackendConfig, to_edge_transform_and_lower
from torch.fx import GraphModule

from pt2e_quant.accelerate.composite_operators import quick_decompositions
from pt2e_quant.accelerate.executorch_passes import fewer_interpretations
from pt2e_quant.accelerate.share_constants import share_constants
from pt2e_quant.accelerate.single_decomposition import decompose_once
from pt2e_quant.backends.name_refused import named_refusals
from pt2e_quant.backends.target.float_retries import Fallback, is_left_plain
from pt2e_quant.backends.target.leave_slower import slower_regions
from pt2e_quant.backends.target.lower import Draft, Job, Lowering, RuntimeOptions, in_float32
from pt2e_quant.backends.xnnpack.artifact import XnnpackArtifact, count_operators, load
from pt2e_quant.backends.xnnpack.contents import read_contents, read_named_data
from pt2e_quant.backends.xnnpack.load_program import load_program
from pt2e_quant.backends.xnnpack.metadata import held_scales, pack_metadata
from pt2e_quant.backends.xnnpack.node_ids import Handles, floats_of, read_handles
from pt2e_quant.backends.xnnpack.partition import make_partitioner
from pt2e_quant.backends.xnnpack.passes.as_convs_and_products import (
    conv1d_as_conv2d,
    group_heads,
    means_as_products,
    selections_as_products,
)
from pt2e_quant.backends.xnnpack.passes.blocks_as_permutes import blocks_as_permutes
from pt2e_quant.backends.xnnpack.passes.data_movement import (
    clip_before_pools,
    crop_negative_pads,
    edges_as_slices,
    move_integers,
    requantize_before_joins,
    requantize_behind_moves,
    shuffles_as_permutations,
)
from pt2e_quant.backends.xnnpack.passes.delegated_functions import functions_in_delegate
from pt2e_quant.backends.xnnpack.passes.edge_forms import (
    can_write_in_place,
    dequantize_for_each_reader,
    gather_shared_inputs,
    keep_contents,
    pad_integers,
    read_rows_through_views,
    read_sizes_of_integers,
    remove_noop_copies,
    write_size_arithmetic,
)
from pt2e_quant.backends.xnnpack.passes.embeddings import (
    LINKED_KERNELS,
    embed_bytes,
    embed_portable,
)
from pt2e_quant.backends.xnnpack.passes.large_kernels import split_large_kernels
from pt2e_quant.backends.xnnpack.passes.lookup_chains import separate_functions
from pt2e_quant.backends.xnnpack.passes.missing_kernels import (
    drop_hints,
    has_complex_kernel,
    long_indices,
    no_out_variant_refused,
    plain_strides,
    refuse_codes,
    refuse_loops,
    refuse_missing_kernels,
    resizing_loops,
    roots_of_sizes,
    write_functions,
)
from pt2e_quant.backends.xnnpack.passes.normalize_overloads import normalize_overloads
from pt2e_quant.backends.xnnpack.passes.own_constants import OWN_CONSTANTS
from pt2e_quant.backends.xnnpack.passes.pools_in_delegate import (
    average_in_delegate,
    pool_by_depthwise,
)
from pt2e_quant.backends.xnnpack.passes.recurrent import (
    STEPS_KEY,
    recurrent_as_steps,
    split_left,
)
from pt2e_quant.backends.xnnpack.passes.recurrent_loops import CONFIG, loop_recurrent
from pt2e_quant.backends.xnnpack.passes.refloat import (
    choose_per_row,
    float_regions,
    has_per_tensor,
    leave_slower,
    refloat_leftovers,
    refloat_products,
    refuse_float,
    split_biases,
    unfold_biases,
)
from pt2e_quant.backends.xnnpack.passes.scale_limits import notes_of_scales
from pt2e_quant.backends.xnnpack.passes.select_nearest import select_nearest
from pt2e_quant.backends.xnnpack.passes.volumes import volumes_as_images, volumes_in_integers
from pt2e_quant.backends.xnnpack.sizes import (
    PlanForDeclared,
    check_planned,
    refuse_unbounded,
    start_small,
)
from pt2e_quant.backends.xnnpack.slices import slices_of_any_batch
from pt2e_quant.backends.xnnpack.table import FUSING, edge_operators
from pt2e_quant.core.checksum import write_sum
from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.core.max_sizes import MaxSizes, limit_sizes
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.core.read_capture import CAPTURE_KEY, capture_of
from pt2e_quant.flow.reexport import export_again
from pt2e_quant.flow.report.audit import record_islands
from pt2e_quant.flow.report.report import FloatRegion, Report
from pt2e_quant.graph.ops import LAYER_NORM, is_call
from pt2e_quant.graph.pipeline import GraphPass, PassRecord, run_passes
from pt2e_quant.graph.subgraphs import copy_graph
from pt2e_quant.passes.attention.decompose_attention import decompose_attention
from pt2e_quant.passes.caches.decompose_caches import decompose_caches
from pt2e_quant.passes.cleanup.drop_dead_constants import drop_dead_constants
from pt2e_quant.passes.cleanup.drop_value_checks import drop_value_checks
from pt2e_quant.passes.cleanup.join_and_split import split_as_slices, unbind_as_selects
from pt2e_quant.passes.cleanup.pool_windows import fixed_windows
from pt2e_quant.passes.cleanup.promote_integers import promote_integers
from pt2e_quant.passes.cleanup.remove_identities import broadcast_expanded, remove_noop_expand
from pt2e_quant.passes.cleanup.simpler_overloads import name_squeezed_dims
from pt2e_quant.passes.cleanup.unroll_loops import has_loops, unroll_loops
from pt2e_quant.passes.functions.table import EARLY, FUNCTIONS
from pt2e_quant.passes.functions.write_complex import write_complex
from pt2e_quant.passes.functions.write_functions import write_functions as write_canonical
from pt2e_quant.passes.mutation.functionalize_state import functionalize_state
from pt2e_quant.passes.qdq.duplicate_dequantize import duplicate_dequantize
from pt2e_quant.passes.qdq.widen_scales import widen_scales
from pt2e_quant.passes.weights.unpack_weights import unpack_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(RuntimeOptions):
    """Options of a lowering.

    Args:
        portable_only: use only ExecuTorch's portable operators outside of the delegate.
        max_sizes: the largest size of dynamic dimensions, by input and dimension,
            {"x": {0: 64}}; the program's own bounds by default.
    """

    portable_only: bool = False
    max_sizes: MaxSizes = field(default_factory=dict)


def lowering_passes(*, portable_only: bool) -> tuple[GraphPass, ...]:
    """The pipeline from canonical graph to the graph that is exported for ExecuTorch."""
    return (
        drop_value_checks,
        drop_hints,
        promote_integers,
        unpack_weights,
        write_complex(has_complex_kernel),
        # Checks and writes are effects, which ExecuTorch cannot take later. Layer norms are written
        # where its kernel was too far from the graph.
        write_canonical(
            FUNCTIONS.keys() - EARLY.keys(), lambda n: is_call(n, LAYER_NORM) and is_left_plain(n)
        ),
        roots_of_sizes,
        widen_scales,
        decompose_caches(has_casts=False),
        refuse_codes,
        functionalize_state,
        volumes_in_integers,
        volumes_as_images,
        plain_strides,
        long_indices,
        decompose_attention,
        group_heads,
        remove_noop_expand,
        broadcast_expanded,
        fixed_windows,
        blocks_as_permutes,
        functions_in_delegate,
        split_left,
        recurrent_as_steps,
        duplicate_dequantize,
        embed_portable if portable_only else embed_bytes,
        name_squeezed_dims,
        split_as_slices,
        requantize_behind_moves,
        unbind_as_selects,
        crop_negative_pads,
        requantize_behind_moves,
        edges_as_slices,
        requantize_before_joins,
        shuffles_as_permutations,
        select_nearest,
        clip_before_pools,
        pool_by_depthwise,
        average_in_delegate,
        normalize_overloads,
        conv1d_as_conv2d,
        move_integers,
        unfold_biases,
        *OWN_CONSTANTS,
        refloat_products,
        refloat_leftovers,
        split_biases,
        gather_shared_inputs,
        means_as_products,
        selections_as_products,
        split_large_kernels,
        drop_dead_constants,
    )


def _start(gm: GraphModule, options: Options) -> GraphModule:
    gm = in_float32(gm if options.is_part else _bounded(gm, options.max_sizes))
    if has_loops(gm):
        gm = copy_graph(gm)
        run_passes(gm, (unroll_loops,))
    refuse_loops(gm)
    result = gm.graph.output_node()
    if not result.all_input_nodes:
        raise UnsupportedError(
            "the model returns no tensor, and a .pte has at least one result",
            node=result,
            fix="return a tensor from forward",
        )
    return gm


def _emit(job: Job[Options]) -> Draft:
    gm, options = job.gm, job.options
    capture = capture_of(gm)
    changed: Sequence[PassRecord] = ()
    if has_per_tensor(gm):
        gm = copy_graph(gm)
        changed = run_passes(gm, (choose_per_row,), validation=job.validation)
    work = copy_graph(gm)
    passes = lowering_passes(portable_only=options.portable_only)
    passes = (leave_slower, *passes) if options.leaves_slower(gm) else passes
    records = run_passes(work, passes, validation=job.validation)
    report = Report(backend="XNNPACK", provenance=provenance_of(gm))
    slower = [n for record in records if record.name == leave_slower.name for n in record.notes]
    told_float = (note for r in records if r.name == refloat_leftovers.name for note in r.notes)
    regions = float_regions(told_float, work, gm)
    telling = {p.name for p in (drop_value_checks, embed_bytes, refloat_products)}
    told = [*changed, *(r for r in records if r.name in telling)]
    report.notes += [f"{n.node}: {n.text}" for r in told for n in r.notes if not n.skipped]
    report.notes += notes_of_scales(work)
    report.float_regions = [*regions, *slower_regions(slower)]
    held = held_scales(work)

    def pack(floats: Set[str], scales: Collection[str] = held) -> dict[str, torch.Tensor]:
        record_islands(report, gm, floats, job.left)
        stored, kept = pack_metadata(capture, report.provenance, scales, options.record)
        report.note_record(kept)
        return stored

    with named_refusals(gm, lambda part: _try_part(part, options)), no_out_variant_refused(gm):
        pte, handles = _to_pte(work, gm, pack)
    if not held <= read_named_data(pte).keys():
        # Another ExecuTorch may name them otherwise: then the scales are written out.
        pte, handles = _to_pte(work, gm, partial(pack, scales=()))
    artifact = XnnpackArtifact(pte, capture, report, handles)
    with named_refusals(gm, lambda part: _try_part(part, options)):
        contents = artifact.contents()
        refuse_missing_kernels(gm, contents.overloads, contents.mistyped)
        load_program(pte).load_method("forward")
    _describe(artifact, gm)
    return Draft(
        artifact=artifact,
        refuse=lambda: refuse_float(gm, regions),
        keeps_weights=bool(slower)
        or any(r.notes for r in records if r.name == refloat_products.name),
    )


def _bounded(gm: GraphModule, max_sizes: MaxSizes) -> GraphModule:
    """A graph all of whose sizes have an upper bound.

    Raises:
        ConfigError: `max_sizes` names what there is not.
        UnsupportedError: a dimension has no bound.
    """
    capture = limit_sizes(capture_of(gm), max_sizes)
    refuse_unbounded(gm, capture)
    if not max_sizes:
        return gm
    made = copy_graph(gm)
    made.meta[CAPTURE_KEY] = capture
    return made


def _try_part(part: GraphModule, options: Options) -> None:
    """Lower a part of a graph as far as to a file that loads; its errors name no node."""
    work = copy_graph(in_float32(part))
    run_passes(work, lowering_passes(portable_only=options.portable_only))
    constants, _ = pack_metadata(capture_of(work), provenance_of(part), ())
    pte, _ = _to_pte(work, part, lambda _: constants)
    contents = read_contents(pte)
    refuse_missing_kernels(part, contents.overloads, contents.mistyped)
    load_program(pte).load_method("forward")


def _to_pte(
    work: GraphModule, gm: GraphModule, pack: Callable[[Set[str]], dict[str, torch.Tensor]]
) -> tuple[bytes, Handles]:
    """The file, and what its debug handles stand for.

    Args:
        work: what is lowered.
        gm: the canonical graph that it was made of.
        pack: gives the program's constant methods, from the names of the nodes of `gm` that it
            computes in float.
    """
    ep = export_again(work, is_stored=True)
    # Those of the edge program may have been narrowed by what torch asked while tracing it.
    ranges = ep.range_constraints
    with (
        torch.no_grad(),
        warnings.catch_warnings(),
        fewer_interpretations(),
        quick_decompositions(),
        decompose_once(),
        resizing_loops(),
        slices_of_any_batch(),
        start_small(ranges),
    ):
        # ExecuTorch's own warnings about its own code; nothing a user can change.
        warnings.simplefilter("ignore")
        edge = to_edge_transform_and_lower(
            ep,
            transform_passes=[
                write_size_arithmetic,
                remove_noop_copies,
                write_functions,
                dequantize_for_each_reader,
                pad_integers,
                read_rows_through_views,
                read_sizes_of_integers,
                separate_functions,
            ],
            partitioner=[make_partitioner(edge_operators(), FUSING)],
            compile_config=CONFIG,
        )
        program = edge.exported_program()
        loop_recurrent(program, work.meta[STEPS_KEY])
        keep_contents(program)
        # Buffers are written in place: the copies of a whole KV cache at each token are dropped.
        config = ExecutorchBackendConfig(
            run_reinplace_pass=can_write_in_place(program),
            sym_shape_eval_pass=PlanForDeclared(program.range_constraints | ranges),
        )
        handles = read_handles(program, [info.name for info in capture_of(work).inputs])
        constants = pack(floats_of(program, handles, gm))
        emitted = EdgeProgramManager(program, constants, CONFIG).to_executorch(config)
        pte = write_sum(share_constants(bytes(emitted.buffer)))
        return pte, handles.emitted(emitted.debug_handle_map["forward"])


def _describe(artifact: XnnpackArtifact, gm: GraphModule) -> None:
    """Fill in the report from the file itself."""
    report, contents = artifact.report, artifact.contents()
    check_planned(gm, artifact.capture, contents.input_sizes)
    report.size_bytes = artifact.size_bytes
    count_operators(report, contents)
    report.notes.append(f"{len(contents.delegates)} XNNPACK partitions")
    if len(artifact.capture.dims) > 1 and contents.delegates:
        report.notes.append(
            "several sizes are dynamic: make the first call on a device with the largest of each, "
            "because XNNPACK plans its memory wrongly for calls that grow in one and shrink in "
            "another; `run` takes care of it"
        )
    for kernel in (k for k in LINKED_KERNELS if contents.kernels[k]):
        report.notes.append(
            f"embeddings use {kernel.replace('.', '::')}: link ExecuTorch's quantized "
            "kernels on the device, or lower with portable_only=True"
        )
    for name, count in contents.undelegated_qdq().items():
        report.float_regions.append(
            FloatRegion(
                node="",
                what=f"{count} {name}",
                reason="the delegate did not take it",
                cost="one pass over the tensor each",
            )
        )


LOWERING = Lowering(
    name="xnnpack",
    options=Options,
    prepare=_start,
    emit=_emit,
    load=load,
    fallback=lambda _: Fallback.PLAIN,
)
