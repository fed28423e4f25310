"""The report of a lowered program: operators counted, and every q/dq that no operator took."""

from collections import Counter
from collections.abc import Sequence

from torch.fx import GraphModule, Node

from pt2e_quant.backends.cpu.passes.single_pass_qdq import FULL_RANGES
from pt2e_quant.backends.fuse_kernels import KERNEL_KEY, REFUSED_KEY
from pt2e_quant.core.qdq import is_dequantize, is_qdq
from pt2e_quant.flow.report.report import FloatRegion, Report
from pt2e_quant.graph.op_table import operator_name
from pt2e_quant.graph.subgraphs import NamedGraph, named_graphs
from pt2e_quant.kernels.cost import moved_bytes
from pt2e_quant.kernels.kernel import Kernel
from pt2e_quant.kernels.onednn.speed import SHAPE_CLASS_KEY, cpu_slug, measured_here

UNFUSED_WEIGHT = "dequantize of a weight"


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
    for record in report.provenance.tensors:
        record.backends["cpu"] = f"{record.dtype} in oneDNN's operators"
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
    kept = "; kept, its tensors are quantized already" if ratio < 1.0 else ""
    return f"{what}: measured {ratio:.2f} times as fast as float on {cpu_slug()}{kept}"


def _gives_integers(node: Node) -> bool:
    return getattr(node.meta.get("val"), "dtype", None) in FULL_RANGES
