"""Float functions in the operators that ONNX Runtime computes fast."""

from torch.fx import GraphModule, Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.ops import LOG_SOFTMAX, PRELU, SOFTMAX, argument, aten, is_call
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass

_POWER = (aten.pow.Tensor_Scalar,)
_ROOTS = {
    0.5: aten.sqrt.default,
    -0.5: aten.rsqrt.default,
    -1: aten.reciprocal.default,
}
_NEIGHBOURS = 2
"""The axes from one on that is next to the last, or the last itself."""


@graph_pass(needs=(HAS_VALUES,), gives=())
def join_behind_softmax(gm: GraphModule) -> PassResult:
    """Join the axes behind that of a softmax to one.

    ONNX Runtime lets the axis change places with the last one, for which it has a fast transpose if
    they are neighbours: up to 4 times (`benchmarks/onnx_softmax.py`). It moves quantizes and
    dequantizes past the reshapes, to the softmax, itself.

    Before:  y = softmax(x[N, C, H, W], 1)
    After:   y = view_as(softmax(flatten(x, 2), 1), x)
    """
    editor, notes = Editor(gm), []
    for node in [n for n in gm.graph.nodes if is_call(n, SOFTMAX + LOG_SOFTMAX)]:
        x: Node = node.args[0]
        rank = x.meta["val"].dim()
        dim = argument(node, "dim") % max(rank, 1)
        if rank - dim <= _NEIGHBOURS:
            continue
        flat = editor.call(aten.flatten.using_ints, x, dim + 1, -1, like=node)
        made = editor.call(node.target, flat, dim, *node.args[2:], like=node, **node.kwargs)
        editor.replace(node, editor.call(aten.view_as.default, made, x, like=node))
        notes.append(Note(node.name, "the axes behind it are joined"))
    return PassResult(changed=editor.finish(), notes=tuple(notes))


@graph_pass(needs=(HAS_VALUES,), gives=())
def powers_as_roots(gm: GraphModule) -> PassResult:
    """Call powers of floats by 0.5, -0.5 and -1 as roots and reciprocals.

    ONNX Runtime's Pow takes 2 to 14 times as long (`benchmarks/onnx_forms.py`).

    Before:  pow(x, 0.5)
    After:   sqrt(x)
    """
    editor, notes = Editor(gm), []
    for node in [n for n in gm.graph.nodes if is_call(n, _POWER)]:
        x, exponent = node.args
        made = _ROOTS.get(exponent) if isinstance(exponent, (int, float)) else None
        if made is not None and x.meta["val"].is_floating_point():
            editor.replace(node, editor.call(made, x, like=node, val=node.meta["val"]))
            notes.append(Note(node.name, f"is {made}"))
    return PassResult(changed=editor.finish(), notes=tuple(notes))


@graph_pass(needs=(HAS_VALUES,), gives=())
def prelus_of_one_slope(gm: GraphModule) -> PassResult:
    """Call a PReLU with one slope for all channels, torch's default, as a leaky ReLU.

    Between integers ONNX Runtime has an operator of them; in float one pass instead of three.

    Before:  prelu(x, [0.25])
    After:   leaky_relu(x, 0.25)
    """
    editor, notes = Editor(gm), []
    for node in [n for n in gm.graph.nodes if is_call(n, PRELU)]:
        x, weight = node.all_input_nodes
        slope = constant_of(gm, weight)
        if slope is None or slope.numel() != 1:
            continue
        made = editor.call(aten.leaky_relu.default, x, slope.item(), like=node)
        editor.replace(node, made)
        notes.append(Note(node.name, f"is {aten.leaky_relu.default}"))
    return PassResult(changed=editor.finish(), notes=tuple(notes))


FLOAT_FORMS = (join_behind_softmax, powers_as_roots, prelus_of_one_slope)
