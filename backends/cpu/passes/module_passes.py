"""Passes over a graph of fused operators: packing, views, sums in place, and Python written out."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Graph, GraphModule, Node

from pt2e_quant.core.cache_ops import PackRows, UnpackRows
from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.core.formats.format_ops import DECOMPOSITIONS
from pt2e_quant.graph.alias import roots
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass
from pt2e_quant.kernels.int4_linear.any_rows_op import LinearOfGroups, linear_of_groups
from pt2e_quant.kernels.int4_linear.few_rows_op import LinearOfInt4, PackInt4, linear_of_int4
from pt2e_quant.kernels.int4_linear.pack_limbs_op import PackInt4Limbs
from pt2e_quant.kernels.int8_linear import multiply_cpu, reference, rows_op
from pt2e_quant.kernels.int8_linear.op import Int8Linear
from pt2e_quant.kernels.int8_linear.rows_op import Int8LinearRows
from pt2e_quant.kernels.onednn.limbs_op import LinearOfLimbs, linear_of_limbs
from pt2e_quant.kernels.onednn.operators import (
    ConvSum,
    LinearSum,
    PackConv,
    PackLinear,
    QConvSum,
    QLinear,
    QLinearSum,
    aten,
)
from pt2e_quant.kernels.quantize_per_token.op import QuantizeRows
from pt2e_quant.kernels.quantize_per_token.reference import quantize_per_token


@graph_pass(needs=(HAS_VALUES,), gives=())
def fold_packing(gm: GraphModule) -> PassResult:
    """Run the packing operators and keep their results, which are opaque to all but oneDNN.

    Before:  qlinear_pointwise(x, …, pack_onednn_linear(w, [4, 8]), …)
    After:   qlinear_pointwise(x, …, packed_linear, …)
    """
    editor = Editor(gm)
    notes = []
    for node in list(gm.graph.nodes):
        if node.target not in (PackLinear, PackConv, PackInt4, PackInt4Limbs):
            continue
        values = [constant_of(gm, a) if hasattr(a, "op") else a for a in node.args]
        packed = node.target(*values)
        name = editor.unique_name(f"packed_{node.name}")
        gm.register_buffer(name, packed, persistent=False)
        with gm.graph.inserting_before(node):
            held = gm.graph.create_node("get_attr", name)
        held.meta["val"] = node.meta["val"]
        editor.replace(node, held)
        notes.append(Note(node.name, "packed"))
    return PassResult(changed=editor.finish(), notes=tuple(notes))


_VIEWS = (aten.view.default, aten._unsafe_view.default)


@graph_pass(needs=(), gives=())
def reshape_views(gm: GraphModule) -> PassResult:
    """Let views copy where the layout asks for it: convolutions give channels-last results here.

    Before:  view(conv2d(x, w), [4, 128])
    After:   reshape(conv2d(x, w), [4, 128])
    """
    editor = Editor(gm)
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target in _VIEWS:
            node.target = aten.reshape.default
            editor.changed = True
    return PassResult(changed=editor.finish())


_SUMMAND, _HOW = 6, 13
"""Positions of the summand, and of a linear's "add" or "sum"."""


_CONTIGUOUS = (QLinear, QLinearSum, aten.layer_norm.default, aten.embedding.default)
"""Their results are contiguous whatever their inputs are; see `QLinearSum` for why that counts."""


class Storage:
    """The values of a graph that share storage, and the last reader of each storage."""

    def __init__(self, graph: Graph) -> None:
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self._roots = roots(graph)
        self._merged: dict[Node, Node] = {}
        self._last_read: dict[Node, int] = {}
        for node, at in self.order.items():
            for source in node.all_input_nodes:
                root = self._roots[source]
                self._last_read[root] = max(self._last_read.get(root, -1), at)

    def root(self, node: Node) -> Node:
        """The value whose storage a node's value may share."""
        root = self._roots[node]
        while root in self._merged:
            root = self._merged[root]
        return root

    def may_be_written(self, call: Node, summand: Node) -> bool:
        """True if a call may write its summand: storage that an operator allocated, read last here.

        Views count as what they are views of.
        """
        root = self.root(summand)
        return (
            root.op == "call_function"
            and self._last_read[root] == self.order[call]
            and call.args.count(summand) == 1  # a convolution's own input may be its summand
            and all(self.root(n) is not root for n in call.all_input_nodes if n is not summand)
        )

    def share(self, call: Node, summand: Node) -> None:
        """Let a call's result have its summand's storage from here on."""
        old, new = self.root(call), self.root(summand)
        self._merged[old] = new
        self._last_read[new] = max(self._last_read[new], self._last_read.get(old, -1))


@graph_pass(needs=(HAS_VALUES,), gives=())
def write_sums_in_place(gm: GraphModule) -> PassResult:
    """Give sums their summand's storage for the result; copy a summand that is read later.

    Before:  onednn_conv_sum(x, …, y, …)
    After:   qconv2d_pointwise.binary(x, …, y, …), or the same on clone(y)
    """
    editor = Editor(gm)
    storage = Storage(gm.graph)
    notes = []
    for node in list(gm.graph.nodes):
        if node.target is ConvSum:
            notes.append(Note(node.name, _write_conv(editor, storage, node)))
        elif node.target is LinearSum:
            editor.changed = True
            notes.append(Note(node.name, _write_linear(editor, storage, node)))
    return PassResult(changed=editor.finish(), notes=tuple(notes))


def _summand(node: Node) -> Node:
    found = node.args[_SUMMAND]
    assert isinstance(found, Node)
    return found


def _write_conv(editor: Editor, storage: Storage, node: Node) -> str:
    """OneDNN has no convolution with a sum that does not write."""
    summand = _summand(node)
    node.target = QConvSum
    editor.changed = True
    if storage.may_be_written(node, summand):
        storage.share(node, summand)
        return "in place"
    value = summand.meta["val"]
    copy = editor.call(aten.clone.default, summand, like=node, before=node, val=value)
    node.args = (*node.args[:_SUMMAND], copy, *node.args[_SUMMAND + 1 :])
    return "the summand is copied: it is read again"


def _write_linear(editor: Editor, storage: Storage, node: Node) -> str:
    summand = _summand(node)
    node.target = QLinearSum
    if summand.target not in _CONTIGUOUS:
        value = summand.meta["val"]
        ordered = editor.call(aten.contiguous.default, summand, like=node, before=node, val=value)
        node.args = (*node.args[:_SUMMAND], ordered, *node.args[_SUMMAND + 1 :])
        return "the summand is kept, and copied where it is not contiguous"
    found, made = summand.meta["val"], node.meta["val"]
    same_shape = [str(size) for size in found.shape] == [str(size) for size in made.shape]
    fits = found.dtype == made.dtype and same_shape
    if not fits or not storage.may_be_written(node, summand):
        return "the summand is kept: it is read again, or of another kind"
    node.args = (*node.args[:_HOW], "sum", *node.args[_HOW + 1 :])
    storage.share(node, summand)
    return "in place"


def write_out(program: ExportedProgram, buffers: Sequence[str] = ()) -> ExportedProgram:
    """Write out the operators of this package that a compiled program would call in Python.

    A call into Python needs this package wherever the file is loaded, and torch's ahead-of-time
    compiler gets some of its dtypes wrong: one left to its default is written as an integer, which
    the loader of torch 2.13 refuses; that of torch 2.11 reads those that are given as others.

    Before:  quantize_per_token(x), int8_linear_rows(x_q, scale, zero_point, packed, …)
    After:   amin(x), amax(x), …, qlinear_pointwise(…), sub, mul, …

    Operators on constants alone stay: a compiler that freezes folds them. A program without such
    operators and without buffers that it writes is given back as it is.

    Args:
        program: what is to be compiled.
        buffers: dotted names of those that a call writes.

    Raises:
        UnsupportedError: an operator of this package on what varies has no form in torch's own; or
            a value is made of written buffers and constants alone, which freezing takes for one.
    """
    table = _table()
    has_any = bool(buffers) or any(node.target in table for node in program.graph.nodes)
    written: ExportedProgram = program.run_decompositions(table) if has_any else program
    frozen = _frozen_state(written)
    if frozen is not None:
        raise UnsupportedError(
            f"{frozen.target} reads a buffer that calls write and no input, and a compiled program "
            "would keep what it gave at first",
            node=frozen,
            fix="run the artifact as it is, or pass that buffer as an input and a result",
        )
    left = _left(written)
    if left is not None:
        raise UnsupportedError(
            f"{left.target} has no form in torch's own operators, which a compiled program is "
            "made of",
            node=left,
            fix="run the artifact as it is, or leave this part float",
        )
    return written


def _table() -> dict[Any, Callable[..., Any]]:
    is_exact = multiply_cpu.int_mm_is_exact()
    return {
        **DECOMPOSITIONS,
        Int8Linear: multiply_cpu.written_out if is_exact else reference.int8_linear,
        Int8LinearRows: rows_op.written_out,
        LinearOfLimbs: linear_of_limbs,
        LinearOfGroups: linear_of_groups,
        LinearOfInt4: linear_of_int4,
        PackRows: _pack_rows,
        QuantizeRows: quantize_per_token,
        UnpackRows: _unpack_rows,
    }


def _shifts(bits: int) -> Tensor:
    if 8 % bits:
        raise UnsupportedError(f"rows of {bits} bits are not compiled", fix="use 4 bits, or 8")
    return torch.arange(0, 8, bits, dtype=torch.uint8)


def _pack_rows(values: Tensor, bits: int, is_signed: bool) -> Tensor:
    """`cache_ops.pack_rows` of values that fit: a tracer cannot look."""
    shifts = _shifts(bits)
    codes = values.to(torch.uint8) & ((1 << bits) - 1)
    places = codes.reshape(*codes.shape[:-1], -1, len(shifts)) << shifts
    packed: Tensor = places.sum(-1, dtype=torch.uint8)
    return packed


def _unpack_rows(packed: Tensor, bits: int, is_signed: bool) -> Tensor:
    """`cache_ops.unpack_rows`."""
    codes = (packed.unsqueeze(-1) >> _shifts(bits)) & ((1 << bits) - 1)
    codes = codes.flatten(-2)
    if not is_signed:
        return codes
    sign = 1 << (bits - 1)
    return (codes ^ sign).to(torch.int8) - sign


def _reached(program: ExportedProgram, *, inputs: bool, state: bool) -> set[Node]:
    """The nodes that depend on the call's inputs, or on buffers that a call writes."""
    signature = program.graph_signature
    written = {*signature.buffers_to_mutate.values()}
    names = {
        spec.arg.name
        for spec in signature.input_specs
        if (inputs and spec.kind is InputKind.USER_INPUT) or (state and spec.target in written)
    }
    found: set[Node] = set()
    for node in program.graph.nodes:
        if node.name in names or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _frozen_state(program: ExportedProgram) -> Node | None:
    """The first value that is made of written buffers and of no input."""
    varying = _reached(program, inputs=True, state=False)
    state = _reached(program, inputs=False, state=True)
    return next(
        (n for n in program.graph.nodes if n.op == "call_function" and n in state - varying), None
    )


def _left(program: ExportedProgram) -> Node | None:
    """The first operator of this package that runs in Python in every call."""
    varying = _reached(program, inputs=True, state=True)
    for node in program.graph.nodes:
        is_own = getattr(node.target, "namespace", "") == "pt2e_quant"
        if is_own and node in varying and node.target not in (ConvSum, LinearSum):
            found: Node = node
            return found
    return None
