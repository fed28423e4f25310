"""Forms that the delegate takes, written into the edge program before it is partitioned.

ExecuTorch decomposes operators when it makes an edge program, so that the passes before did not
see all that stands there: `unfold` becomes a pad and an index. A copy between two operators of
the delegate cuts it in two. In ExecuTorch's graphs every tensor is contiguous, so a clone that
only changes strides and an expand to the same shape do nothing, and are removed.
"""

import operator
from itertools import pairwise
from typing import Any

import torch
from executorch.exir.dialects._ops import ops as exir_ops
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassResult as EdgeResult

from pt2e_quant.core.qdq import QdqKind, is_quantize, kind_of_qdq
from pt2e_quant.graph.ops import LINEAR, is_call
from pt2e_quant.graph.pipeline import Note, PassResult, graph_pass

_EDGE = exir_ops.edge.aten
_QDQ = exir_ops.edge.quantized_decomposed
_QUANTIZE = _QDQ.quantize_per_tensor.default
_DEQUANTIZE = _QDQ.dequantize_per_tensor.default
_OF_ROWS = frozenset(
    {
        _EDGE._softmax.default,
        _QDQ.choose_qparams_per_token_asymmetric.default,
        _QDQ.quantize_per_token.default,
    }
)
_COLUMNS_LAST = frozenset(
    {
        _EDGE.view_copy.default,
        _EDGE.squeeze_copy.dims,
        _EDGE.unsqueeze_copy.default,
        _EDGE.linear.default,
    }
)
"""Operators that the delegate computes with the last dimension last, whatever the layout read."""

_ACTIVATIONS = frozenset({_EDGE.relu.default, _EDGE.hardtanh.default, _EDGE.clamp.default})
"""Operators that the delegate fuses into what they read."""


def write_size_arithmetic(gm: GraphModule) -> EdgeResult:
    """Write sums and powers of sizes with what ExecuTorch's programs compute sizes with.

    Before:  torch.sym_sum((a, b, c));  a ** 2
    After:   (a + b) + c;               a * a
    """
    changed = False
    for node in list(gm.graph.nodes):
        if node.target is torch.sym_sum:
            terms, join = list(node.args[0]), operator.add
        elif node.target in (pow, operator.pow) and isinstance(node.args[1], int):
            terms, join = [node.args[0]] * node.args[1], operator.mul
        else:
            continue
        made, value = terms[0], _size(terms[0])
        for term in terms[1:]:
            value = join(value, _size(term))
            with gm.graph.inserting_before(node):
                made = gm.graph.call_function(join, (made, term))
            made.meta = {**node.meta, "val": value}
        node.replace_all_uses_with(made)
        gm.graph.erase_node(node)
        changed = True
    if changed:
        gm.recompile()
    return EdgeResult(gm, changed)


def _size(value: Any) -> Any:
    return value.meta["val"] if isinstance(value, Node) else value


def dequantize_for_each_reader(gm: GraphModule) -> EdgeResult:
    """Give each reader of an integer activation a dq of its own.

    A decomposition may read one dq several times. Where its readers want different layouts,
    ExecuTorch (1.4) turns the dq to the layout of one and hands it to all.

    Before:  x = dq(x_q);  where(gt(x, 0), x, mul(w, x))
    After:   where(gt(dq(x_q), 0), dq(x_q), mul(w, dq(x_q)))
    """
    changed = False
    for node in list(gm.graph.nodes):
        if node.target is not _DEQUANTIZE or node.args[0].op != "call_function":
            continue
        for user in list(node.users)[1:]:
            with gm.graph.inserting_after(node):
                own = gm.graph.call_function(_DEQUANTIZE, node.args, node.kwargs)
            own.meta = dict(node.meta)
            user.replace_input_with(node, own)
            changed = True
    if changed:
        gm.recompile()
    return EdgeResult(gm, changed)


def pad_integers(gm: GraphModule) -> EdgeResult:
    """Give a pad of integers with 0 a q and a dq of its own behind it.

    ExecuTorch (1.4) inserts them inside the delegate where the pad's input may be float: the
    program then does not load. Values are the same: 0 and what is dequantized are values that
    the qparams have.

    Before:  pad(dq(x_q), [2, 0])
    After:   dq(q(pad(dq(x_q), [2, 0])))
    """
    changed = False
    for node in list(gm.graph.nodes):
        if node.target is not _EDGE.constant_pad_nd.default or not _pads_integers(node):
            continue
        source: Any = node.args[0]
        integers: Any = source.args[0]
        with gm.graph.inserting_after(node):
            stored = gm.graph.call_function(_QUANTIZE, (node, *source.args[1:]))
        with gm.graph.inserting_after(stored):
            back = gm.graph.call_function(_DEQUANTIZE, (stored, *source.args[1:]))
        node.replace_all_uses_with(back, delete_user_cb=lambda user, own=stored: user is not own)
        back.meta = dict(node.meta)
        stored.meta = {**node.meta, "val": node.meta["val"].to(integers.meta["val"].dtype)}
        changed = True
    if changed:
        gm.recompile()
    return EdgeResult(gm, changed)


def _pads_integers(node: Node) -> bool:
    args: Any = node.args
    source, pads = args[:2]
    value = args[2] if len(args) > 2 else 0
    return (
        source.target is _DEQUANTIZE
        and not value
        and all(isinstance(p, int) and p >= 0 for p in pads)
        and not any(user.target is _QUANTIZE for user in node.users)
    )


def read_sizes_of_integers(gm: GraphModule) -> EdgeResult:
    """Read sizes from the integers of a value, not from the value that is quantized to them.

    The delegate takes no integer operator whose result something beside its quantize reads.

    Before:  y = relu(conv(…)); q(y); sym_size(conv(…), 2)
    After:   y = relu(conv(…)); sym_size(q(y), 2)
    """
    changed = False
    for size in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sym_size.int):
        value = size.args[0]
        path = _to_integers(value)
        if not path or value.op != "call_function":
            continue
        for node in reversed(path):
            value.append(node)
        size.replace_input_with(value, path[-1])
        changed = True
    if changed:
        gm.recompile()
    return EdgeResult(gm, changed)


def _to_integers(value: Node) -> list[Node]:
    """The activations that read a value alone, up to their quantize; empty if there is none."""
    stored = next((u for u in value.users if u.target is _QUANTIZE), None)
    if stored is not None:
        return [stored]
    readers = [u for u in value.users if u.target is not torch.ops.aten.sym_size.int]
    if len(readers) != 1 or readers[0].target not in _ACTIVATIONS:
        return []
    rest = _to_integers(readers[0])
    return [*readers, *rest] if rest else []


def read_rows_through_views(gm: GraphModule) -> EdgeResult:
    """Read four dimensions whose rows are quantized at run time through a view of their shape.

    The delegate computes convolutions with channels last, and linears with columns last.
    ExecuTorch (1.4) puts the transpose between the two behind the dq of a linear's input, and
    then finds no dq there; before a softmax it puts none, and channels are summed in place of
    columns. For a view it puts it in front.

    Before:  x = conv(…);                linear(dq(q(x, *choose_qparams(x))), dq(w_q))
    After:   x = view(conv(…), [N, C, H, W]); linear(dq(q(x, *choose_qparams(x))), dq(w_q))
    """
    changed = False
    for value in list(gm.graph.nodes):
        readers = [u for u in value.users if u.target in _OF_ROWS and u.args[0] is value]
        if not readers or value.op != "call_function" or value.target in _COLUMNS_LAST:
            continue
        if value.meta["val"].dim() != 4:
            continue
        view = view_in_own_shape(gm, value)
        for reader in readers:
            reader.replace_input_with(value, view)
        changed = True
    if changed:
        gm.recompile()
    return EdgeResult(gm, changed)


def view_in_own_shape(gm: GraphModule, value: Node) -> Node:
    """A view of a value in its own shape."""
    shape: list[Any] = list(value.meta["val"].shape)
    dynamic = [i for i, size in enumerate(shape) if not isinstance(size, int)]
    place = value.next
    with gm.graph.inserting_before(place):
        for index in dynamic:
            if len(dynamic) == 1:
                shape[index] = -1  # the delegate takes one size that it finds itself
                continue
            size = gm.graph.call_function(torch.ops.aten.sym_size.int, (value, index))
            size.meta = {"val": shape[index]}
            shape[index] = size
        view = gm.graph.call_function(_EDGE.view_copy.default, (value, shape))
    view.meta = dict(value.meta)
    return view


_COPIES = frozenset(
    {
        exir_ops.edge.aten.clone.default,
        exir_ops.edge.aten.expand_copy.default,
        exir_ops.edge.aten.alias_copy.default,
        exir_ops.edge.dim_order_ops._clone_dim_order.default,
        exir_ops.edge.dim_order_ops._to_dim_order_copy.default,
    }
)


def remove_noop_copies(gm: GraphModule) -> EdgeResult:
    """Let the readers of a copy read its input where shape, dtype and dim order are the same."""
    changed = False
    for node in list(gm.graph.nodes):
        if node.target in _COPIES and _is_noop(node):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
            changed = True
    if changed:
        gm.recompile()
    return EdgeResult(gm, changed)


def _is_noop(node: Node) -> bool:
    source = node.args[0]
    # An output must not be an input of the program.
    if not isinstance(source, Node) or (
        source.op != "call_function" and any(u.op == "output" for u in node.users)
    ):
        return False
    before, after = source.meta.get("val"), node.meta.get("val")
    return (
        isinstance(before, Tensor)
        and isinstance(after, Tensor)
        and before.dtype == after.dtype
        and str(before.shape) == str(after.shape)
        and before.dim_order() == after.dim_order()
    )


@graph_pass(needs=(), gives=())
def gather_shared_inputs(gm: GraphModule) -> PassResult:
    """Move the linears that share an input quantized at run time behind the first of them.

    ExecuTorch's partitioner takes them as one and tries to join it with its neighbours once, from
    the last one's place: an operator between the first and the last then cuts the delegate.

    Before:  g = linear(dq(x_q), …); s = sigmoid(g); u = linear(dq(x_q), …); s * u
    After:   g = linear(dq(x_q), …); u = linear(dq(x_q), …); s = sigmoid(g); s * u
    """
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    notes = []
    for node in [n for n in gm.graph.nodes if is_quantize(n)]:
        if kind_of_qdq(node) is not QdqKind.PER_TOKEN:
            continue
        readers = [r for dq in node.users for r in dq.users if is_call(r, LINEAR)]
        linears = sorted(readers, key=order.__getitem__)
        if not any(_is_apart(first, second) for first, second in pairwise(linears)):
            continue
        last, place = linears[0], order[linears[0]]
        for linear in linears[1:]:
            for part in (*_own_inputs(linear, node), linear):
                # What stands before them may have readers there: layers that share a weight.
                if order[part] > place:
                    last.append(part)
                    last, order[part] = part, place
        notes.append(Note(node.name, f"its {len(linears)} linears stand together"))
    return PassResult(bool(notes), tuple(notes))


def _own_inputs(linear: Node, quantized: Node) -> list[Node]:
    """The dq of the shared input, and what a linear reads of constants, inputs first."""
    found: dict[Node, None] = {}
    for source in linear.all_input_nodes:
        if quantized not in source.all_input_nodes:
            found |= dict.fromkeys(source.all_input_nodes)
        found[source] = None
    return list(found)


def _is_apart(first: Node, second: Node) -> bool:
    """True if more than the second linear's own inputs stand between two linears."""
    own = {second, *second.all_input_nodes}
    own |= {n for source in second.all_input_nodes for n in source.all_input_nodes}
    current = first.next
    while current is not second:
        if current not in own:
            return True
        current = current.next
    return False


_PUT = exir_ops.edge.aten.index_put.default
_VIEWS = frozenset(
    {
        exir_ops.edge.aten.view_copy.default,
        exir_ops.edge.aten.squeeze_copy.dims,
        exir_ops.edge.aten.squeeze_copy.dim,
        exir_ops.edge.aten.unsqueeze_copy.default,
        exir_ops.edge.aten.alias_copy.default,
    }
)
"""Operators whose result ExecuTorch may place where their input is."""


def can_write_in_place(ep: ExportedProgram) -> bool:
    """True if ExecuTorch may write every value that is put at indices into its buffer.

    Its pass does so wherever no later operator reads what is overwritten. It does not ask
    whether that is a result of the program, or is read through a view. Its kernel (1.4) takes
    one index of one dimension for whole rows, without a sum; it fails at run time on others.
    """
    signature = ep.graph_signature
    buffers = {
        name
        for name, buffer in signature.inputs_to_buffers.items()
        if buffer in signature.buffers_to_mutate.values()
    }
    puts = [node for node in ep.graph.nodes if node.target is _PUT]
    return all(_puts_whole_rows(n) and _is_last_reader(n, buffers) for n in puts)


def _puts_whole_rows(node: Node) -> bool:
    """True if one row of the values is put at each place of one index."""
    args: Any = node.args
    whole, indices, values = args[:3]
    accumulates = args[3] if len(args) > 3 else node.kwargs.get("accumulate", False)
    dims = [i for i, index in enumerate(indices) if index is not None]
    if accumulates or len(dims) != 1 or indices[dims[0]].meta["val"].dim() != 1:
        return False
    expected = list(whole.meta["val"].shape)
    expected[dims[0]] = indices[dims[0]].meta["val"].shape[0]
    return [str(size) for size in expected] == [str(s) for s in values.meta["val"].shape]


def _is_last_reader(node: Node, buffers: set[str]) -> bool:
    """True if nothing needs a buffer's former value once a node has put others into it."""
    whole: Any = node.args[0]
    if any(u.op == "output" or u.target in _VIEWS for u in whole.users if u is not node):
        return False
    return whole.name in buffers if whole.op == "placeholder" else whole.target is _PUT


def keep_contents(ep: ExportedProgram) -> None:
    """Mark the buffers that calls write and that are not empty, so that their values are stored.

    ExecuTorch stores no values of such buffers unless told to. Empty ones take no room in the
    file: zeros, and the least scales, which those of a quantized cache's empty rows are.
    """
    signature = ep.graph_signature
    written = set(signature.buffers_to_mutate.values())
    for node in ep.graph.nodes:
        name = signature.inputs_to_buffers.get(node.name) if node.op == "placeholder" else None
        held = ep.state_dict.get(name, ep.constants.get(name)) if name in written else None
        if isinstance(held, Tensor) and not _is_empty(held):
            node.meta["et_init_buffer"] = True


def _is_empty(value: Tensor) -> bool:
    if value.is_floating_point():
        return bool((value.abs() <= torch.finfo(value.dtype).tiny).all())
    return not value.any()
