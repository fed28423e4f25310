"""Lowering: a canonical graph to a module of fused kernels, and its report."""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch.fx import GraphModule, Node

from pt2e_quant.backends.cuda.artifact import CudaArtifact
from pt2e_quant.backends.cuda.policy import UNMEASURED, Measures, measures_here
from pt2e_quant.backends.cuda.table import REGISTRY
from pt2e_quant.backends.edited_copy import edited_copy
from pt2e_quant.backends.fuse_kernels import KERNEL_KEY, REFUSED_KEY, Decide, fuse_kernels
from pt2e_quant.backends.program_file import StoredProgram, read_program, write_program
from pt2e_quant.backends.target.lower import Draft, Job, Lowering
from pt2e_quant.backends.target.lower import Options as AnyOptions
from pt2e_quant.core.errors import Pt2eQuantWarning, UnsupportedError
from pt2e_quant.core.formats.format_ops import DequantizeBlock
from pt2e_quant.core.qdq import is_dequantize, is_qdq
from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.core.schemes import Role
from pt2e_quant.flow.report.report import FloatRegion, Report
from pt2e_quant.graph.op_table import ALLOWED_KEY, OUT, SLOWER, operator_name
from pt2e_quant.graph.ops import arguments, is_getitem
from pt2e_quant.graph.pattern import Match, find_matches
from pt2e_quant.graph.pipeline import GraphPass, PassResult, Validation
from pt2e_quant.graph.subgraphs import NamedGraph, named_graphs
from pt2e_quant.kernels.cost import moved_bytes
from pt2e_quant.kernels.int8_conv2d.op import widen_pixels
from pt2e_quant.kernels.kernel import Kernel
from pt2e_quant.kernels.measured import Variant, measured_of
from pt2e_quant.kernels.norm_quantize.op import (
    NormQuantizePerToken,
    NormQuantizePerTokenE4m3,
    fuse_norm_per_token,
    fuse_norm_per_token_e4m3,
)
from pt2e_quant.kernels.quantize.op import Quantize, QuantizePixels, fuse_lone_e4m3, fuse_lone_qdq
from pt2e_quant.kernels.quantize_per_tensor.op import QuantizeTensor, QuantizeTensorE4m3
from pt2e_quant.kernels.quantize_per_token.fuse_choose import (
    fuse_choose_e4m3,
    fuse_choose_quantize,
    fuse_choose_tensor,
    fuse_choose_tensor_e4m3,
)
from pt2e_quant.kernels.quantize_per_token.op import QuantizeRows, QuantizeRowsE4m3
from pt2e_quant.kernels.quantized_values import requantized
from pt2e_quant.kernels.read_scheme import scheme_of, slots_fit
from pt2e_quant.kernels.registry import Registry
from pt2e_quant.passes.cleanup.drop_dead_constants import drop_dead_constants
from pt2e_quant.passes.cleanup.strip_guards import strip_guards
from pt2e_quant.passes.qdq.duplicate_dequantize import duplicate_dequantize
from pt2e_quant.passes.qdq.shift_activations import signed_activations
from pt2e_quant.passes.qdq.widen_scales import widen_chosen_scales

SUFFIX = ".qcuda"

_UNMEASURED, _SLOWER, _STRICT = "allow_unmeasured", "allow_slower", "strict"
"""The options that a file keeps: `load` on another machine decides with them as `lower` did."""


def lowering_passes(registry: Registry, measures: Measures) -> tuple[GraphPass, ...]:
    """The passes of a lowering, in order: producers of per-token integers before their readers."""
    return (
        strip_guards,
        signed_activations,
        *_allowed(measures, _BEFORE),
        duplicate_dequantize,
        widen_untaken_scales(registry),
        fuse_kernels(registry, decide_by(measures), output=torch.int8),
        *_allowed(measures, _BEHIND),
        drop_dead_constants,
    )


_Fusion: TypeAlias = tuple[str, Variant, GraphPass]

_BEFORE: tuple[_Fusion, ...] = (
    ("quantize_per_token", Variant.PLAIN, fuse_choose_quantize),
    ("quantize_per_token", Variant.E4M3, fuse_choose_e4m3),
    ("quantize_per_tensor", Variant.PLAIN, fuse_choose_tensor),
    ("quantize_per_tensor", Variant.E4M3, fuse_choose_tensor_e4m3),
    ("norm_quantize", Variant.PLAIN, fuse_norm_per_token),
    ("norm_quantize", Variant.E4M3, fuse_norm_per_token_e4m3),
)
_BEHIND: tuple[_Fusion, ...] = (
    ("quantize", Variant.PIXELS, widen_pixels),
    ("quantize", Variant.PLAIN, fuse_lone_qdq),
    ("quantize", Variant.E4M3, fuse_lone_e4m3),
)
"""Operators without a pattern of their own: unit, what it writes, and the pass that inserts it."""


def _allowed(measures: Measures, fusions: Sequence[_Fusion]) -> list[GraphPass]:
    """The passes of what this device has and is to use."""
    return [
        fuse
        for op, variant, fuse in fusions
        if (measures.has_fp8 or variant is not Variant.E4M3) and measures.allows(op, variant)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(AnyOptions):
    """Options of a lowering.

    Args:
        registry: the kernels.
        allow_unmeasured: use kernels that were not measured on the device at hand; the report
            names them.
        allow_slower: use kernels that measured slower than float on the device at hand.

    What the quantizer was allowed, `quantizer.allowing("unmeasured", "slower")`, holds as well.
    """

    registry: Registry = REGISTRY
    allow_unmeasured: bool = False
    allow_slower: bool = False


def _emit(job: Job[Options]) -> Draft:
    """A module of fused kernels; on a CPU it runs by their definitions."""
    options = job.options
    allowed = job.gm.meta.get(ALLOWED_KEY, ())
    choices = {
        _UNMEASURED: options.allow_unmeasured or UNMEASURED in allowed,
        _SLOWER: options.allow_slower or SLOWER in allowed,
    }
    stored = write_program(job.gm, "cuda", {**choices, _STRICT: options.strict}, options.record)
    artifact = _assemble(stored, options.registry, measures_here(**choices), job.validation)

    def refuse() -> None:
        unfused = _unfused_weights(artifact.report)
        allow = (
            "lower(..., allow_unmeasured=True) (--allow-unmeasured) to use kernels that were not "
            "measured here"
        )
        slower = "allow_slower=True (--allow-slower) to use kernels that measured slower, "
        other = "give this module a scheme of the op table (docs/backends/cuda.md), or None"
        if not choices[_SLOWER]:
            other = slower + other
        if unfused:
            raise UnsupportedError(
                unfused,
                fix=f"{other if choices[_UNMEASURED] else allow}, strict=False to dequantize such "
                "weights in every call",
            )

    return Draft(artifact=artifact, refuse=refuse)


def load(
    path: str | Path,
    *,
    registry: Registry = REGISTRY,
    allow_unmeasured: bool | None = None,
    allow_slower: bool | None = None,
) -> CudaArtifact:
    """Read a file that an artifact of this backend saved, and lower it for this machine.

    What it was lowered with holds where `allow_unmeasured` or `allow_slower` is None. A weight that
    is dequantized in every call here, where `lower` would have refused it, is warned of.

    Raises:
        ArtifactError: the file is missing, damaged or not one of ours.
    """
    stored = read_program(path, "cuda", SUFFIX)
    asked = {_UNMEASURED: allow_unmeasured, _SLOWER: allow_slower}
    choices = {
        name: stored.choices.get(name, False) if chosen is None else chosen
        for name, chosen in asked.items()
    }
    artifact = _assemble(stored, registry, measures_here(**choices))
    artifact.quantized = stored.gm
    unfused = _unfused_weights(artifact.report) if stored.choices.get(_STRICT, True) else ""
    if unfused:
        allow = "load(..., allow_unmeasured=True) to use kernels that were not measured here"
        other = "give this module a scheme whose kernels this GPU has"
        fix = other if choices[_UNMEASURED] else allow
        warnings.warn(str(UnsupportedError(unfused, fix=fix)), Pt2eQuantWarning, stacklevel=3)
    return artifact


def _assemble(
    stored: StoredProgram,
    registry: Registry,
    measures: Measures,
    validation: Validation | None = None,
) -> CudaArtifact:
    gm = stored.gm
    lowered = lower_graph(gm, registry, measures, validation)
    report = stored.report("CUDA")
    describe(report, lowered, measures)
    return CudaArtifact(lowered, stored.data, capture_of(gm), report)


def lower_graph(
    gm: GraphModule,
    registry: Registry,
    measures: Measures,
    validation: Validation | None = None,
) -> GraphModule:
    """The fused graph of a canonical one, which is not changed."""
    return edited_copy(gm, lowering_passes(registry, measures), validation=validation)


def _unfused_weights(report: Report) -> str:
    """The weights that every call dequantizes, which is slower than float; "" if there are none."""
    unfused = [
        float_region
        for float_region in report.float_regions
        if float_region.what == "weight dequantize"
    ]
    if not unfused:
        return ""
    first, more = unfused[0], len(unfused) - 1
    others = f" and of {more} more" if more else ""
    return f"no kernel takes the quantized weight of {first.node}{others}: {first.reason}"


LOWERING = Lowering(name="cuda", options=Options, prepare=lambda gm, _: gm, emit=_emit, load=load)


def decide_by(measures: Measures) -> Decide:
    """A decision whether a kernel takes a match, by its q/dq, its op-table entry and its speed."""

    def decide(gm: GraphModule, refused: dict[str, str]) -> Callable[[Kernel, Match], bool]:
        return lambda kernel, match: _takes(gm, measures, kernel, match, refused)

    return decide


def _takes(
    gm: GraphModule, measures: Measures, kernel: Kernel, match: Match, refused: dict[str, str]
) -> bool:
    if not slots_fit(gm, kernel.row, match) or not _output_fits(kernel, match):
        return False
    broken = kernel.row.refusal(match)
    if broken is not None:
        reason: str | None = f"{kernel.op} needs {broken.text}"
    else:
        reason = measures.objection(kernel, match)
    if reason is None:
        return True
    refused.setdefault(match.anchor.name, reason)
    return False


def _output_fits(kernel: Kernel, match: Match) -> bool:
    """True if a result that the row wants quantized is, as the row wants it."""
    slot = next((s for s in kernel.row.slots if s.role is Role.OUTPUT and s.at == OUT), None)
    if slot is None or slot.is_optional:
        return True
    written = requantized(match.anchor)
    return written is not None and any(written[0].dtype == a.dtype for a in slot.accepts)


def widen_untaken_scales(registry: Registry) -> GraphPass:
    """A pass that widens scales as `passes.widen_scales` does, but for those that a kernel reads.

    Before:  linear(x, dequantize_block(weight_q: int4, weight_scale: bfloat16, …))
             linear(x, dequantize_block(weight_q: int8, weight_scale: bfloat16, …))
    After:   linear(x, dequantize_block(weight_q: int4, weight_scale: bfloat16, …))
             linear(x, dequantize_per_channel(weight_q: int8, scale: float32, …))

    Kernels for 4-bit weights read scales of 16 bits as they are: fewer bytes in every call.

    Args:
        registry: the kernels.
    """

    def takes(kernel: Kernel, match: Match) -> bool:
        gm = match.anchor.graph.owning_module
        assert isinstance(gm, GraphModule)
        return slots_fit(gm, kernel.row, match) and kernel.row.refusal(match) is None

    def edit(gm: GraphModule) -> PassResult:
        blocks = [n for n in gm.graph.nodes if n.target is DequantizeBlock]
        if not blocks:
            return PassResult(changed=False)
        patterns = [(kernel, op) for kernel in registry for op in kernel.row.find]
        taken = {
            value
            for _, match in find_matches(gm.graph, patterns, takes)
            for value in match.values.values()
            if isinstance(value, Node)
        }
        return widen_chosen_scales(gm, [n for n in blocks if n not in taken])

    return GraphPass("widen_untaken_scales", edit, needs=(), gives=())


_OPS: dict[object, str] = {
    QuantizeTensor: "quantize_per_tensor",
    QuantizeTensorE4m3: "quantize_per_tensor",
    QuantizeRows: "quantize_per_token",
    QuantizeRowsE4m3: "quantize_per_token",
    NormQuantizePerToken: "norm_quantize",
    NormQuantizePerTokenE4m3: "norm_quantize",
    Quantize: "quantize",
    QuantizePixels: "quantize",
}
"""Operators that passes insert without an entry of the registry."""

_WRITE_BOTH = frozenset(_OPS.values())
"""Units whose results in 8-bit floats were measured apart from those in integers."""


def describe(report: Report, lowered: GraphModule, measures: Measures) -> None:
    """Count operators; name kernels in use that were not measured, and lone q/dq with reasons."""
    kernels: Counter[str] = Counter()
    floats: Counter[str] = Counter()
    written: set[tuple[str, Variant]] = set()
    for graph, node in ((g, n) for g in named_graphs(lowered) for n in g.gm.graph.nodes):
        op = _fused_op(node)
        if op is not None:
            kernels[op] += 1
            written.add((op, _variant(node, op)))
        elif node.op == "call_function" and not is_getitem(node):
            floats[operator_name(node)] += 1
            if is_qdq(node):
                report.float_regions.append(_float_region(graph, node))
    report.integer_ops, report.float_ops = dict(kernels), dict(floats)
    unmeasured = sorted({_named(*one) for one in written if not _was_measured(*one, measures)})
    if unmeasured:
        where = measures.device or "a GPU"
        report.notes.append(f"not measured on {where}: {', '.join(unmeasured)}")


def _fused_op(node: Node) -> str | None:
    """The unit whose kernel a node calls, by its entry or by its operator; None for any other."""
    kernel: Kernel | None = node.meta.get(KERNEL_KEY)
    if kernel is not None:
        return kernel.op
    return _OPS.get(node.target) if node.op == "call_function" else None


def _variant(node: Node, op: str) -> Variant:
    """The output dtype of a fused call, where its kernel was measured separately for it."""
    if node.target is QuantizePixels:
        return Variant.PIXELS
    value = node.meta["val"]
    made = value[0] if isinstance(value, tuple | list) else value
    is_e4m3 = made.dtype is torch.float8_e4m3fn and op in _WRITE_BOTH
    return Variant.E4M3 if is_e4m3 else Variant.PLAIN


def _named(op: str, variant: Variant) -> str:
    return f"{op} to {variant}" if variant else op


def _was_measured(op: str, variant: Variant, measures: Measures) -> bool:
    return op == "data_movement" or bool(measured_of(op, measures.device, variant))


def _unmatched(gm: GraphModule, node: Node, reader: Node) -> str:
    """Why no kernel came into question: by the scheme of the tensor, where it is one."""
    if not is_dequantize(node) or reader.op != "call_function":
        return "no kernel has its pattern"
    scheme = scheme_of(gm, node)
    if scheme is not None:
        return f"no kernel has {operator_name(reader)} on {scheme}"
    block = arguments(node).get("block_size")
    return f"no kernel has blocks of {block}" if block else "no kernel has its pattern"


def _float_region(graph: NamedGraph, node: Node) -> FloatRegion:
    """A q/dq that runs by itself: a pass over memory."""
    refused: dict[str, str] = graph.gm.meta.get(REFUSED_KEY, {})
    is_weight = node.args[0] in graph.constants
    source = node.args[0]
    assert isinstance(source, Node)
    moved = moved_bytes(source.meta["val"], node.meta["val"])
    reader = next(iter(node.users)) if is_dequantize(node) else source
    what = "weight dequantize" if is_weight else operator_name(node).rpartition(".")[2]
    return FloatRegion(
        node=graph.prefix + reader.name,
        what=what,
        reason=refused.get(reader.name) or _unmatched(graph.gm, node, reader),
        # Symbolic for dynamic shapes, which no thousands separator is for.
        cost=f"{moved:,} bytes in every call" if type(moved) is int else f"{moved} bytes a call",
    )
