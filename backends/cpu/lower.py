"""Lowering: one walk from a canonical graph to oneDNN's fused operators."""

import copy
import warnings
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.fx import GraphModule, Node

from pt2e_quant.backends.cpu.artifact import CpuArtifact
from pt2e_quant.backends.cpu.exact_products import multiplies_exactly
from pt2e_quant.backends.cpu.fuse_operators import fuse_operators
from pt2e_quant.backends.cpu.keep_integers import FULL_RANGES, move_integers, single_pass_qdq
from pt2e_quant.backends.gate import check_artifact, choose_sample
from pt2e_quant.backends.program_file import StoredProgram, read_program, write_program
from pt2e_quant.core.canonical import verify_canonical
from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.core.provenance import PROVENANCE_KEY, provenance_of
from pt2e_quant.core.qdq import is_dequantize
from pt2e_quant.core.read_capture import CAPTURE_KEY, capture_of
from pt2e_quant.flow.report import Island, Report
from pt2e_quant.graph.meta import constant_nodes
from pt2e_quant.graph.op_table import operator_name
from pt2e_quant.graph.pipeline import GraphPass, run_passes
from pt2e_quant.kernels.quantized_values import affine_of
from pt2e_quant.passes.drop_dead_constants import drop_dead_constants
from pt2e_quant.passes.duplicate_dequantize import duplicate_dequantize
from pt2e_quant.passes.strip_guards import strip_guards

__all__ = ["LOWERING_PASSES", "load", "lower", "lower_graph"]

LOWERING_PASSES: tuple[GraphPass, ...] = (
    strip_guards,
    duplicate_dequantize,
    fuse_operators,
    move_integers,
    single_pass_qdq,
    drop_dead_constants,
)

_FIX = 'quantize with recipe "int8-reduced", whose sums are exact on any CPU'


def lower(
    gm: GraphModule,
    example_inputs: Sequence[Any] | None = None,
    *,
    strict: bool = True,
    verify: bool = True,
    margin_db: float = 6.0,
) -> CpuArtifact:
    """Canonical graph to CPU artifact; see `Backend.lower`.

    Raises:
        InvariantError: the graph is not canonical.
        UnsupportedError: sums would saturate on this machine; or, under `strict`, a weight
            would be dequantized in every call.
        ArtifactError: the artifact fails its check.
    """
    verify_canonical(gm)
    _refuse_saturation(gm)
    artifact = _assemble(gm, write_program(gm, "cpu"))
    if strict and (weights := [i for i in artifact.report.islands if i.what == _WEIGHT]):
        raise UnsupportedError(
            f"oneDNN has no fused operator for the quantized weight of {weights[0].node}"
            + (f" and {len(weights) - 1} more" if len(weights) > 1 else ""),
            fix="lower(..., strict=False) to dequantize it in every call",
        )
    if verify:
        check_artifact(artifact, gm, choose_sample(gm, example_inputs), margin_db)
        artifact.reset()
    return artifact


def load(path: Any) -> CpuArtifact:
    """Read a file that an artifact of this backend saved, and pack its weights for this machine.

    Raises:
        ArtifactError: the file is missing, damaged or not one of ours.
        UnsupportedError: sums would saturate on this machine.
    """
    stored = read_program(path, "cpu", ".qpt2")
    gm = stored.gm
    gm.meta[CAPTURE_KEY] = stored.capture
    gm.meta[PROVENANCE_KEY] = stored.provenance
    _refuse_saturation(gm)
    return _assemble(gm, stored)


def _assemble(gm: GraphModule, stored: StoredProgram) -> CpuArtifact:
    lowered = lower_graph(gm)
    _hear_deprecation()
    report = Report(backend="oneDNN", provenance=provenance_of(gm), size_bytes=len(stored.data))
    _describe(report, lowered)
    return CpuArtifact(lowered, stored.data, capture_of(gm), report)


@cache
def _hear_deprecation() -> None:
    """Let torch say once what it says once a process: its quantized tensors are to go.

    Nothing a user can change; this package pins the torch versions that have them.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.quantize_per_tensor(torch.zeros(1), 1.0, 0, torch.quint8).dequantize()
        torch._make_per_tensor_quantized_tensor(torch.zeros(1, dtype=torch.uint8), 1.0, 0)


def lower_graph(gm: GraphModule) -> GraphModule:
    """The fused graph of a canonical one, which is not changed; buffers it writes are copied."""
    with warnings.catch_warnings():
        # torch 2.13 deprecates a class that its own pytrees are copied with.
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
        work = GraphModule(gm, copy.deepcopy(gm.graph))
    work.meta = dict(gm.meta)
    for name in capture_of(gm).mutated_buffers:
        owner, _, leaf = name.rpartition(".")
        holder = work.get_submodule(owner)
        setattr(holder, leaf, getattr(holder, leaf).clone())
    with torch.no_grad():
        run_passes(work, LOWERING_PASSES)
    return work


def _refuse_saturation(gm: GraphModule) -> None:
    """Refuse 8-bit activations where oneDNN's sums of products saturate.

    Raises:
        UnsupportedError: naming the first such activation.
    """
    for node in gm.graph.nodes:
        affine = affine_of(node) if is_dequantize(node) else None
        if affine is not None and affine.dtype is torch.uint8 and affine.quant_max > 127:
            if multiplies_exactly():
                return
            raise UnsupportedError(
                "this machine's oneDNN saturates sums of 8-bit products (it has no VNNI, or "
                "ONEDNN_MAX_CPU_ISA hides it)",
                node=node,
                fix=_FIX,
            )


_WEIGHT = "dequantize of a weight"


def _describe(report: Report, lowered: GraphModule) -> None:
    """Count operators, and name every q/dq that no operator took."""
    constants = constant_nodes(lowered.graph)
    counts: Counter[str] = Counter()
    floats: Counter[str] = Counter()
    for node in lowered.graph.nodes:
        if node.op != "call_function":
            continue
        name = operator_name(node)
        if name.startswith(("onednn.", "quantized.")) or _gives_integers(node):
            counts[name] += 1
        else:
            floats[name] += 1
        if is_dequantize(node) and node.args[0] in constants:
            reader = next(iter(node.users)).name
            report.islands.append(
                Island(
                    node=reader,
                    what=_WEIGHT,
                    reason="no fused operator takes it",
                    cost="one pass over the weight in every call",
                )
            )
    report.integer_ops, report.float_ops = dict(counts), dict(floats)
    for record in report.provenance.tensors:
        record.backends["cpu"] = f"{record.dtype} in oneDNN's operators"
    pairs = counts["aten.int_repr"], floats["aten.dequantize"]
    report.notes.append(f"{pairs[0]} quantize and {pairs[1]} dequantize passes left")


def _gives_integers(node: Node) -> bool:
    return getattr(node.meta.get("val"), "dtype", None) in FULL_RANGES
