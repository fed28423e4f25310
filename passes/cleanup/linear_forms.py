"""Write linears in the forms that backends have kernels for."""

from collections.abc import Callable

from torch.fx import GraphModule, Node
from torch.nn import functional as F

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.ops import LINEAR, argument, aten, is_call
from pt2e_quant.graph.pipeline import HAS_VALUES, GraphPass, Note, PassResult, graph_pass
from pt2e_quant.graph.rewrite import Skip
from pt2e_quant.passes.cleanup.contractions import (
    Contraction,
    Weights,
    einsum_contraction,
    linears_of,
    product_contraction,
)


@graph_pass(needs=(HAS_VALUES,), gives=())
def products_as_linears(gm: GraphModule) -> PassResult:
    """Write products of a value and a constant as linears: GPT-2's layers are such.

    Scales of channels and groups then run along the rows of a weight, as those of other layers.
    A view that joins axes for addmm's sake goes behind the linear: what stands before it, such as
    a norm, is then next to the layer.

    Before:  addmm(b, view(x, [-1, K]), w)             w: [K, N], constant; b: [N], constant
    After:   view(linear(x, w.T, b), [-1, N])

    Before:  matmul(w, x)                              w: [S, T], constant; x: [B, T, D]
    After:   linear(x.permute([0, 2, 1]), w).permute([0, 2, 1])

    Before:  baddbmm(b, x, w)                          w: [H, K, N], constant; x: [H, M, K]
    After:   cat([linear(x[h : h + 1], w[h].T) for h]) + b

    Before:  tensordot(x, w, [1, 2], [0, 1])           w: [J, K, N], constant
    After:   linear(x.flatten(1, 2), w.reshape(-1, N).T)
    """
    return _as_linears(gm, lambda node: product_contraction(gm, node))


@graph_pass(needs=(HAS_VALUES,), gives=())
def vectors_as_rows(gm: GraphModule) -> PassResult:
    """Give linears by a vector, which torch takes too, a weight of one row.

    Before:  linear(x, w, b)                                     w: [K]; b: []
    After:   linear(x, w.unsqueeze(0), b.unsqueeze(0)).squeeze(-1)
    """
    editor = Editor(gm)
    for node in [n for n in gm.graph.nodes if is_call(n, LINEAR)]:
        x, *given = (argument(node, name) for name in ("input", "weight", "bias"))
        if given[0].meta["val"].dim() != 1:
            continue
        rows = (
            None if v is None else editor.call(aten.unsqueeze.default, v, 0, like=node)
            for v in given
        )
        made = editor.call(aten.linear.default, x, *rows, like=node)
        editor.replace(node, editor.call(aten.squeeze.dim, made, -1, like=node))
    return PassResult(editor.finish(), ())


@graph_pass(needs=(HAS_VALUES,), gives=())
def einsums_as_linears(gm: GraphModule) -> PassResult:
    """Write einsum of a value and a constant, whose axes are summed or new, as a linear.

    Before:  einsum("btd,hde->bhte", x, w)                    w: [H, D, E], constant
    After:   linear(x, w').unflatten(-1, [H, E]).permute(…)   w': [H * E, D]
    """

    def read(node: Node) -> Contraction | Skip | None:
        return einsum_contraction(gm, node) if is_call(node, (aten.einsum.default,)) else None

    return _as_linears(gm, read)


def _as_linears(gm: GraphModule, read: Callable[[Node], Contraction | Skip | None]) -> PassResult:
    editor, notes = Editor(gm), []
    weights: Weights = {}
    for node in list(gm.graph.nodes):
        found = read(node)
        if isinstance(found, Skip):
            notes.append(Note(node.name, found.reason, skipped=True))
        elif found is not None:
            editor.replace(node, linears_of(found, editor, node, weights))
            notes.append(Note(node.name, "written as a linear"))
    return PassResult(editor.finish(), tuple(notes))


def pad_linears(group_size_of: Callable[[Node], int | None]) -> GraphPass:
    """The pass that pads each linear to a multiple of its group size.

    Before:  linear(x, w, b),                                     w: [rows, 100]
    After:   linear(pad(x, [0, 28]), w', b),                      w': [rows, 128]

    Args:
        group_size_of: the group size that a linear's weight will get, None for no groups.
    """

    @graph_pass(needs=(), gives=())
    def pad_linears(gm: GraphModule) -> PassResult:
        editor = Editor(gm)
        notes = []
        for node in [n for n in gm.graph.nodes if is_call(n, LINEAR)]:
            weight, group_size = argument(node, "weight"), group_size_of(node)
            value = constant_of(gm, weight) if isinstance(weight, Node) else None
            if group_size is None or value is None or value.shape[-1] % group_size == 0:
                continue
            missing = -value.shape[-1] % group_size
            source = argument(node, "input")
            padded = editor.call(aten.pad.default, source, [0, missing], like=node, before=node)
            name = str(weight.target) if weight.op == "get_attr" else weight.name
            held = editor.constant(f"{name}_padded", F.pad(value, (0, missing)), like=weight)
            node.replace_input_with(source, padded)
            node.replace_input_with(weight, held)
            editor.discard([weight])
            notes.append(
                Note(node.name, f"{missing} zero columns added for groups of {group_size}")
            )
        return PassResult(editor.finish(), tuple(notes))

    return pad_linears
