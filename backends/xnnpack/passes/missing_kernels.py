"""Operators that ExecuTorch has no kernel for, or runs wrong: write them out, or report the line.

ExecuTorch 1.4 copies values of a dynamic size through loops without resizing them, and takes the
strides of a constant for its layout.
"""

import functools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from executorch.exir.dialects._ops import ops as exir_ops
from executorch.exir.emit._emitter import EValue, Instruction, Int, KernelCall, _Emitter
from executorch.exir.passes.scalar_to_tensor_pass import ScalarToTensorPass
from executorch.exir.passes.sym_to_tensor_pass import SymToTensorPass
from executorch.runtime import Runtime
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassResult as EdgeResult

from pt2e_quant.backends.target.refuse_formats import refuse_formats
from pt2e_quant.backends.xnnpack.recipes import RECIPES
from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import attribute, constant_nodes
from pt2e_quant.graph.ops import argument, arguments, aten
from pt2e_quant.graph.pipeline import HAS_VALUES, PassResult, graph_pass
from pt2e_quant.graph.strides import has_plain_strides
from pt2e_quant.graph.subgraphs import bodies
from pt2e_quant.passes.functions import draws
from pt2e_quant.passes.functions.elementwise import log_softmax_of_float64
from pt2e_quant.passes.functions.rows import Results
from pt2e_quant.passes.functions.sizes_of_run_time import scatter_reduce
from pt2e_quant.passes.functions.table import FUNCTIONS
from pt2e_quant.passes.functions.write_complex import operator_of
from pt2e_quant.passes.functions.write_functions import write_out

_WRITTEN: Mapping[str, Callable[..., Results]] = {
    **FUNCTIONS,
    "aten._log_softmax.default": log_softmax_of_float64,
    "aten.native_dropout.default": draws.dropout,
    "aten.rand_like.default": draws.rand_like,
    "aten.randn_like.default": draws.randn_like,
    "aten.scatter_reduce.two": functools.partial(scatter_reduce, has_extremes=False),
}
_KERNELS = (
    *("aten.atan2.default", "aten.celu.default", "aten.clamp.default", "aten.elu.default"),
    *("aten.expm1.default", "aten.index_put.default", "aten.selu.default"),
)
"""Functions that are not written out, because ExecuTorch has kernels for them."""
_CONTROL_FLOW = ("cond", "map_impl", "scan")
_FIX = "write it with other operators, or compute it outside of the model"


@graph_pass(needs=(), gives=())
def refuse_codes(gm: GraphModule) -> PassResult:
    """Stop at codes that XNNPACK has no kernel for, before a later pass folds them into floats.

    Raises:
        UnsupportedError: naming the first.
    """
    refuse_formats(gm, RECIPES)
    return PassResult(changed=False)


def refuse_loops(gm: GraphModule) -> None:
    """Stop at control flow that ExecuTorch's programs cannot say: they have cond, map and scan.

    Raises:
        UnsupportedError: naming the first.
    """
    for body in bodies(gm):
        name = str(getattr(body.call.target, "__name__", body.call.target))
        if name not in _CONTROL_FLOW:
            raise UnsupportedError(
                f"ExecuTorch's programs have no {name}",
                node=body.call,
                fix="write the loop with scan or map, or in Python with a fixed number of rounds; "
                "ONNX Runtime and the CPU take it as it is",
            )


def refuse_missing_kernels(
    gm: GraphModule, overloads: Iterable[str], mistyped: Iterable[str] = ()
) -> None:
    """Stop at operators outside of the delegate that the runtime at hand has no kernel for.

    Args:
        gm: the canonical graph, to name the line.
        overloads: "namespace::operator.overload" of the program's own calls.
        mistyped: those that a call gives a number for a tensor: no kernel takes that.

    Raises:
        UnsupportedError: naming the first.
    """
    known = set(Runtime.get().operator_registry.operator_names)
    for name in sorted({*(set(overloads) - known), *mistyped}):
        raise _no_kernel(gm, name)


@contextmanager
def no_out_variant_refused(gm: GraphModule) -> Iterator[None]:
    """Name the line behind ExecuTorch's complaint of an operator without an out variant.

    Raises:
        UnsupportedError: instead of its RuntimeError.
    """
    try:
        yield
    except RuntimeError as error:
        found = re.search(r"Missing out variants: \{'(\w+::\w+)", str(error))
        if found is None:
            raise
        raise _no_kernel(gm, found[1]) from error


def _no_kernel(gm: GraphModule, name: str) -> UnsupportedError:
    """An error that names the operator, and the node if one alone calls it by that name."""
    operator = name.split(".")[0]
    called = [n for n in gm.graph.nodes if _name(n) == operator]
    node = called[0] if len({n.target for n in called}) == 1 else None
    return UnsupportedError(f"ExecuTorch has no kernel for {name}", node=node, fix=_FIX)


def _name(node: Node) -> str:
    """The operator that a node calls, as "namespace::name"; empty for other nodes."""
    return str(node.target._schema.name) if isinstance(node.target, OpOverload) else ""


_OF_TENSORS: Mapping[Any, Any] = {
    pow: aten.pow.Tensor_Scalar,
    operator.pow: aten.pow.Tensor_Scalar,
    operator.truediv: aten.div.Tensor,
    operator.mul: aten.mul.Tensor,
    operator.add: aten.add.Tensor,
    operator.sub: aten.sub.Tensor,
}
"""Operators of tensors that compute the same as Python's operators of numbers."""


def has_complex_kernel(node: Node) -> bool:
    """True if ExecuTorch computes a call that reads or gives complex numbers.

    Its transforms keep the layout that torch gives their results for the last dimension only.
    """
    name = operator_of(node)
    if name in ("fft_rfft", "fft_irfft"):
        axis = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", -1)
        return axis in (-1, node.meta["val"].dim() - 1)
    return name in ("abs", "istft", "mul", "stft")


@graph_pass(needs=(HAS_VALUES,), gives=())
def roots_of_sizes(gm: GraphModule) -> PassResult:
    """Compute roots of dynamic sizes with tensors: ExecuTorch's programs have none of numbers.

    Before:  mul(x, size ** 0.5 + 1)
    After:   mul(x, add(pow(scalar_tensor(size), 0.5), 1))
    """
    editor = Editor(gm)
    tensors: dict[Node, Node] = {}
    for node in list(gm.graph.nodes):
        read = [source for source in node.all_input_nodes if source in tensors]
        if isinstance(node.meta.get("val"), Tensor):
            for source in read:
                node.replace_input_with(source, tensors[source])
        elif node.target in _OF_TENSORS and (read or _is_root(node)):
            left, right = node.args
            left = tensors.get(left) or _scalar_tensor(editor, left, node)
            if isinstance(right, Node):
                right = tensors.get(right) or _scalar_tensor(editor, right, node)
            target = _OF_TENSORS[node.target]
            tensors[node] = editor.call(target, left, right, like=node, before=node)
    return PassResult(changed=editor.finish())


def _is_root(node: Node) -> bool:
    return node.target in (pow, operator.pow) and isinstance(node.args[1], float)


def _scalar_tensor(editor: Editor, number: Any, node: Node) -> Node:
    return editor.call(
        aten.scalar_tensor.default, number, like=node, before=node, dtype=torch.float32
    )


def write_functions(gm: GraphModule) -> EdgeResult:
    """Write the functions of `_WRITTEN` out, in the edge program and its bodies.

    ExecuTorch's decompositions have written larger operators as them by then.

    Before:  exp2(x)
    After:   exp(mul(x, 0.6931…))
    """
    changed = False
    for body in (m for m in gm.modules() if isinstance(m, GraphModule)):
        names = {n: _edge_name(n) for n in body.graph.nodes if n.op == "call_function"}
        wanted = _WRITTEN.keys() - {*_KERNELS}
        calls = [n for n, name in names.items() if name in wanted]
        if any([write_out(body, n, _WRITTEN[names[n]], _edge) for n in calls]):
            body.graph.eliminate_dead_code()
            body.recompile()
            changed = True
    if not changed:
        return EdgeResult(gm, False)
    # The delegate takes no numbers as operands, and a kernel that is given one for a tensor stops
    # the process.
    gm = ScalarToTensorPass()(gm).graph_module
    return EdgeResult(SymToTensorPass()(gm).graph_module, True)


def _edge_name(node: Node) -> str:
    """An edge operator with its overload, for example "aten.exp2.default"; "" for others."""
    operator = getattr(node.target, "_op", None)
    return str(operator) if operator is not None else ""


def _edge(target: Any) -> Any:
    """The edge operator of an ATen overload: the copying one of a view. Sizes have none."""
    if not isinstance(target, torch._ops.OpOverload) or target is torch.ops.aten.sym_size.int:
        return target
    namespace = getattr(exir_ops.edge, target.namespace)
    name = f"{target._opname}_copy" if target.is_view else target._opname
    return getattr(getattr(namespace, name), target._overloadname)


@contextmanager
def resizing_loops() -> Iterator[None]:
    """While the block runs, loops are written with operators that resize their results.

    `_Emitter._emit_scan` writes `aten::copy_` for states and `et_copy_index` for what is kept of
    each step. Both leave the sizes that were planned, so that a smaller batch stops in them.
    `aten::copy.out` gives its result the size of its first argument; what is kept gets the size of
    the first state, with a step in front, before the loop. Of an out variant the result stands
    twice: as an argument, and as what is returned.

    Before:  copy_(state, next, False) -> state
    After:   unsqueeze_copy(state, 0, kept) -> kept; copy.out(next, next, False, state) -> state
    """
    original = _Emitter._emit_scan

    def emit_scan(self: Any, args: Any, outputs: Any) -> Any:
        _resize_kept(self, args[1], outputs)
        start = len(self.chain.instructions)
        found = original(self, args, outputs)
        index, _ = self._get_operator(name="aten::copy_")
        resizing, _ = self._get_operator(name="aten::copy", overload="out")
        for instruction in self.chain.instructions[start:]:
            call = instruction.instr_args
            if isinstance(call, KernelCall) and call.op_index == index:
                _, value, is_blocking, state = call.args
                call.op_index, call.args = resizing, [value, value, is_blocking, state, state]
        return found

    _Emitter._emit_scan = emit_scan
    try:
        yield
    finally:
        _Emitter._emit_scan = original


def _resize_kept(emitter: Any, states: Any, outputs: Any) -> None:
    """Give what is kept of each step the size of a step, where it is the first state."""
    first = states[0]
    for kept in outputs[len(states) :]:
        if list(kept.tensor.sizes[1:]) != list(first.tensor.sizes):
            continue
        index, _ = emitter._get_operator(name="aten::unsqueeze_copy", overload="out")
        axis = emitter._emit_evalue(EValue(Int(0)))
        arguments = [first.id, axis.id, kept.id, kept.id]
        call = Instruction(KernelCall(op_index=index, args=arguments))
        emitter.chain.instructions.append(call)


_LONG = {aten.embedding.default: "indices", aten.gather.default: "index"}
"""Kernels that take places as int64 alone, and the argument that has them."""


@graph_pass(needs=(HAS_VALUES,), gives=())
def long_indices(gm: GraphModule) -> PassResult:
    """Cast places of int32 where kernels take int64: `embedding_byte` stops the process.

    Before:  embedding(table, places[int32])
    After:   embedding(table, to(places, int64))
    """
    editor = Editor(gm)
    made: dict[Node, Node] = {}
    for node in [n for n in gm.graph.nodes if n.target in _LONG]:
        places: Any = argument(node, _LONG[node.target])
        if places.meta["val"].dtype is torch.int64:
            continue
        if places not in made:
            made[places] = editor.call(aten.to.dtype, places, torch.int64, like=node, before=node)
        node.replace_input_with(places, made[places])
        editor.changed = True
    return PassResult(editor.finish())


@graph_pass(needs=(), gives=())
def drop_hints(gm: GraphModule) -> PassResult:
    """Drop what kernels refuse and no value depends on.

    That is whether to wait for a copy, and the layout of a new tensor.

    Before:  to(x, float64, non_blocking=True);  zeros_like(x, memory_format=channels_last)
    After:   to(x, float64, non_blocking=False); zeros_like(x)
    """
    changed = False
    for node in [n for n in gm.graph.nodes if isinstance(n.target, OpOverload)]:
        given = arguments(node)
        if given.get("non_blocking") is True:
            if "non_blocking" in node.kwargs:
                node.update_kwarg("non_blocking", False)
            else:
                node.update_arg([*given].index("non_blocking"), False)
            changed = True
        if str(node.target._schema.name).endswith("_like") and given.get("memory_format"):
            node.kwargs = {k: v for k, v in node.kwargs.items() if k != "memory_format"}
            changed = True
    return PassResult(changed)


@graph_pass(needs=(), gives=())
def plain_strides(gm: GraphModule) -> PassResult:
    """Store constants that are views, or in channels-last, as new tensors; the model's stay.

    Before:  bmm(p, x)          p: [4, 1, 16], strides (16, 64, 1)
    After:   bmm(p_plain, x)    p_plain: [4, 1, 16], strides (16, 16, 1)
    """
    editor = Editor(gm)
    made: dict[str, Node] = {}
    constants = constant_nodes(gm.graph)
    for node in [n for n in gm.graph.nodes if n.op == "get_attr" and n in constants]:
        tensor = attribute(gm, str(node.target))
        if not isinstance(tensor, Tensor) or has_plain_strides(tensor):
            continue
        if str(node.target) not in made:
            plain = tensor.detach().clone(memory_format=torch.contiguous_format)
            made[str(node.target)] = editor.constant(f"{node.target}_plain", plain, like=node)
        editor.replace(node, made[str(node.target)])
    return PassResult(editor.finish())
