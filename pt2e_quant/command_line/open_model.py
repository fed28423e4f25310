"""Any model file by its suffix, opened for running or described: ours, or one of .pt2."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from pt2e_quant.backends.artifact import Artifact
from pt2e_quant.backends.quiet import quiet_imports
from pt2e_quant.backends.registry import get, name_for_suffix, suffixes
from pt2e_quant.backends.target.backend import Backend
from pt2e_quant.command_line.program_file import load_program
from pt2e_quant.core.capture import Capture
from pt2e_quant.core.errors import ArtifactError, InvariantError, module_path
from pt2e_quant.core.provenance import FloatRecord, Provenance, TensorRecord, provenance_of
from pt2e_quant.core.qdq import QDQ_OPS, is_dequantize, is_quantize, read_qparams
from pt2e_quant.core.read_capture import capture_of, rebuild_capture
from pt2e_quant.core.schemes import Role
from pt2e_quant.flow.archive.layout import is_archive
from pt2e_quant.flow.archive.program import load
from pt2e_quant.flow.prepare.prepared import (
    PREPARED_KEY,
    observers_of,
    prepared_graphs,
    prepared_state,
)
from pt2e_quant.flow.report.report import Report
from pt2e_quant.graph.meta import source_constant
from pt2e_quant.graph.op_table import operator_name


def describe_archive(gm: GraphModule, path: Path) -> Report:
    """The state of a loaded program: converted, with its table; or prepared, with its observers.

    Args:
        gm: of `load`.
        path: of the file, for its size.
    """
    report = describe_program(gm)
    table = provenance_of(gm)
    report.size_bytes = sum(p.stat().st_size for p in _files(path))
    if table.sizes:
        report.float_size_bytes = table.float_bytes
    if table.tensors or table.floats:
        report.provenance = table
    if PREPARED_KEY in gm.meta:
        report.backend = "prepared program"
        observers = {id(o): o for g in prepared_graphs(gm) for _, o in observers_of(g)}.values()
        seen = sum(bool(getattr(o, "seen", True)) for o in observers)
        held = sum(len(prepared_state(g).constants) for g in prepared_graphs(gm))
        report.notes = [
            f"{len(observers)} observers, {seen} of them have seen data or need none",
            f"{held} constants are quantized at convert",
        ]
    else:
        report.backend = "converted program"
    return report


def _files(path: Path) -> list[Path]:
    """The file and its shards, which have its name with a digest and a number."""
    return [
        path,
        *path.parent.glob(f"{path.stem}-????????????-[0-9][0-9][0-9][0-9][0-9]{path.suffix}"),
    ]


RunLeaves = Callable[[Sequence[Any]], Sequence[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenModel:
    """A model file ready to run.

    Args:
        capture: the call it takes.
        report: what is quantized in it.
        run_leaves: runs it on a call's leaves.
        program: the graph that the file holds, or the artifact of a backend.
    """

    capture: Capture
    report: Report
    run_leaves: RunLeaves
    program: GraphModule | Artifact


def backend_of(path: Path) -> Backend:
    """The backend that writes files of this suffix.

    Raises:
        ArtifactError: there is none.
    """
    if name := name_for_suffix(path.suffix):
        return get(name)
    raise ArtifactError(
        f'{path}: no backend writes files that end in "{path.suffix}"',
        fix=f"give a file that ends in one of {', '.join(['.pt2', *suffixes()])}",
    )


def open_model(path: Path) -> OpenModel:
    """Open a .pt2 program, a file of pt2e_quant.save, or an artifact that a backend wrote.

    Raises:
        ArtifactError: the file is missing, damaged, or not one of ours.
        MissingExtraError: the backend's package is not installed.
    """
    gm: GraphModule
    if path.suffix == ".pt2":
        gm = load_program(path).module()
        return OpenModel(
            capture=rebuild_capture(gm),
            report=describe_program(gm),
            run_leaves=_runner(gm),
            program=gm,
        )
    if is_archive(path):
        gm = load(path)
        return OpenModel(
            capture=capture_of(gm),
            report=describe_archive(gm, path),
            run_leaves=_runner(gm),
            program=gm,
        )
    if path.suffix and not path.exists():
        raise ArtifactError(f"there is no file {path}", fix="check the path")
    artifact: Artifact = backend_of(path).load(path)
    return OpenModel(
        capture=artifact.capture,
        report=artifact.report,
        run_leaves=artifact.run_leaves,
        program=artifact,
    )


def open_reference(path: Path, capture: Capture, *, threads: int) -> RunLeaves:
    """Open a model for timing, by its runtime alone: also a .pte or .onnx of another tool.

    Args:
        path: of the file.
        capture: the call that it takes.
        threads: of its runtime.

    Raises:
        ArtifactError: the file is missing or damaged.
        MissingExtraError: the package that runs it is not installed.
    """
    torch.set_num_threads(threads)
    openers = {".onnx": _open_onnx, ".pte": _open_pte}
    if path.suffix not in openers:
        return open_model(path).run_leaves
    if not path.is_file():
        raise ArtifactError(f"there is no file {path}", fix="check the path")
    return openers[path.suffix](path, capture, threads)


def _runner(gm: GraphModule) -> RunLeaves:
    capture = capture_of(gm)

    def run(leaves: Sequence[Any]) -> Sequence[Any]:
        with torch.no_grad():
            # As it was exported: unlike a prepared graph, it tells keywords from positions.
            args, kwargs = pytree.tree_unflatten(list(leaves), capture.in_spec)
            return pytree.tree_leaves(gm(*args, **kwargs))

    return run


def _open_onnx(path: Path, capture: Capture, threads: int) -> RunLeaves:
    get("onnx").require_extra()
    from pt2e_quant.backends.onnx.metadata import taken_inputs
    from pt2e_quant.backends.onnx.runtime import SessionCall, open_session

    call = SessionCall(open_session(path, threads=threads))
    taken = taken_inputs(capture)
    return lambda leaves: call.run(list(compress(leaves, taken)))


def _open_pte(path: Path, capture: Capture, threads: int) -> RunLeaves:
    get("xnnpack").require_extra()
    with quiet_imports():
        from pt2e_quant.backends.xnnpack.load_program import open_file

    call = open_file(path, threads=threads)
    return lambda leaves: call.run(call.given(leaves))


def describe_program(gm: GraphModule) -> Report:
    """The quantized part of a program: its q/dq nodes, and the operators between them."""
    provenance = Provenance(quantizer="read off the graph")
    integer: Counter[str] = Counter()
    floating: Counter[str] = Counter()
    between: set[Node] = set()
    has_qdq = any(n.op == "call_function" and n.target in QDQ_OPS for n in gm.graph.nodes)
    reason = (
        "it is not between dequantize and quantize" if has_qdq else "this program is not quantized"
    )
    for node in gm.graph.nodes:
        if is_quantize(node) or is_dequantize(node):
            record = _tensor(gm, node)
            if record is not None:
                provenance.tensors.append(record)
        elif not _computes_float(node) or _makes_scales(node):
            continue
        elif _is_integer(node, between):
            between.add(node)
            integer[operator_name(node)] += 1
        else:
            floating[operator_name(node)] += 1
            provenance.floats.append(_float(node, reason))
    tensors = {id(t): t for t in [*gm.parameters(), *gm.buffers()]}
    size = sum(_bytes(t) for t in tensors.values())
    saved = sum(r.size_before - r.size_after for r in provenance.tensors if r.size_after)
    return Report(
        backend="torch.export program",
        provenance=provenance,
        integer_ops=dict(integer),
        float_ops=dict(floating),
        size_bytes=size,
        float_size_bytes=size + saved,
        notes=["read off the graph: what stands between dequantize and quantize counts as integer"]
        if has_qdq
        else [],
    )


def _is_integer(node: Node, between: set[Node]) -> bool:
    """True if a backend can run a node in integers: on a stored weight, or from dq to q."""
    if any(is_dequantize(n) and _stored(n) is not None for n in node.all_input_nodes):
        return True
    starts = any(is_dequantize(n) or n in between for n in node.all_input_nodes)
    return starts and any(is_quantize(user) for user in node.users)


def _makes_scales(node: Node) -> bool:
    """True if a node only lays out the double-quantized scales of other q/dq."""
    readers = list(node.users)
    return bool(readers) and all(
        (is_quantize(user) or is_dequantize(user)) and user.args[0] is not node for user in readers
    )


def _stored(node: Node) -> Node | None:
    """The constant that a q/dq reads."""
    source = node.args[0]
    assert isinstance(source, Node)
    return source_constant(source)


def _tensor(gm: GraphModule, node: Node) -> TensorRecord | None:
    """A record for a quantize of an activation, or a dequantize of a stored constant."""
    source = node.args[0]
    assert isinstance(source, Node)
    constant = _stored(node)
    if is_dequantize(node) and constant is None:
        return None
    value = source.meta.get("val")
    stored = _bytes(value) if constant is not None and isinstance(value, Tensor) else 0
    record = TensorRecord(
        name=str(constant.target) if constant is not None else source.name,
        role=Role.WEIGHT if constant is not None else Role.INPUT,
        module=module_path(node),
        uses=[user.name for user in node.users],
    )
    try:
        qparams = read_qparams(gm, node)
    except InvariantError:
        record.dtype = "dynamic"
        return record
    record.dtype = str(qparams.dtype).removeprefix("torch.")
    record.quant_min, record.quant_max = qparams.quant_min, qparams.quant_max
    record.axis = qparams.axis
    record.scale, record.zero_point = qparams.scale.tolist(), qparams.zero_point.tolist()
    if stored and isinstance(value, Tensor):
        # With its qparams: a float32 scale and an int64 zero_point each.
        record.size_after = stored + 12 * len(record.scale)
        record.size_before = 4 * value.numel()
    return record


def _float(node: Node, reason: str) -> FloatRecord:
    constants = (n.meta.get("val") for n in node.all_input_nodes if n.op == "get_attr")
    return FloatRecord(
        node=node.name,
        op=operator_name(node),
        module=module_path(node),
        reason=reason,
        size=sum(_bytes(v) for v in constants if isinstance(v, Tensor)),
    )


def _computes_float(node: Node) -> bool:
    value = node.meta.get("val")
    first = value[0] if isinstance(value, (tuple, list)) and value else value
    return node.op == "call_function" and isinstance(first, Tensor) and first.is_floating_point()


def _bytes(tensor: Tensor) -> int:
    return int(tensor.numel() * tensor.element_size())
