"""Write operators as others that the table has, before annotation; values stay the same.

silu becomes x * sigmoid(x), rrelu a leaky_relu, a number added to an integer tensor becomes a
constant: each part then has a row, and integers of its own.
"""

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.op_table import KEEP_FLOAT_KEY
from pt2e_quant.graph.ops import (
    ADD,
    AVG_POOL1D,
    AVG_POOL2D,
    DIV,
    MAX_POOL1D,
    MUL,
    SILU,
    SUB,
    argument,
    arguments,
    aten,
    each_axis,
    is_call,
    is_depthwise,
)
from pt2e_quant.graph.pattern import Match, Op, Var, one_of
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass
from pt2e_quant.graph.rewrite import Rule, Skip, rewrite
from pt2e_quant.passes.cleanup.transposed_convolutions import shuffle_upsampling


@graph_pass(needs=(HAS_VALUES,), gives=())
def simplify_for_table(gm: GraphModule) -> PassResult:
    """Rewrite silu, rrelu, pools of sequences and pools of one window.

    Before:  silu(x);         rrelu(x, 0.1, 0.3);  max_pool1d(x, 2)
    After:   x * sigmoid(x);  leaky_relu(x, 0.2);  squeeze(max_pool2d(unsqueeze(x, -2), [1, 2]), -2)
    Before:  avg_pool2d(x[1, 8, 7, 7], [7, 7])
    After:   adaptive_avg_pool2d(x, [1, 1])
    """
    silu = Rule("silu", find=Op(SILU, Var("x")), build=_silu)
    return rewrite(gm, (silu, RRELU, POOL1D, WHOLE_POOL))


def _silu(m: Match, editor: Editor) -> Node | Skip:
    gate = editor.call(aten.sigmoid.default, m["x"], like=m.anchor)
    return editor.call(aten.mul.Tensor, m["x"], gate, like=m.anchor)


def _rrelu(m: Match, editor: Editor) -> Node | Skip:
    lower, upper = (float(argument(m.anchor, name)) for name in ("lower", "upper"))
    if argument(m.anchor, "training"):
        return Skip("in training it draws its slopes")
    return editor.call(aten.leaky_relu.default, m["x"], (lower + upper) / 2, like=m.anchor)


RRELU = Rule("rrelu", find=Op(one_of((aten.rrelu.default,)), Var("x")), build=_rrelu)
"""ExecuTorch has no kernel for rrelu; in evaluation its slope is the mean one."""


_POOLS = {
    aten.max_pool1d.default: aten.max_pool2d.default,
    aten.avg_pool1d.default: aten.avg_pool2d.default,
}


def _pool_images(m: Match, editor: Editor) -> Node | Skip:
    """As images of one row: ExecuTorch's own kernels of sequences compute element by element."""
    pool = m.anchor
    if m["x"].meta["val"].dim() != 3:
        return Skip("it is no batch of sequences")
    given = arguments(pool)
    kernel = each_axis(given["kernel_size"], 1)
    for name, neutral in (("kernel_size", 1), ("stride", 1), ("padding", 0), ("dilation", 1)):
        if name in given:
            given[name] = [neutral, *each_axis(given[name] or kernel, 1)]
    _, *rest = given.values()
    images = editor.call(aten.unsqueeze.default, m["x"], -2, like=pool)
    pooled = editor.call(_POOLS[pool.target], images, *rest, like=pool)
    return editor.call(aten.squeeze.dims, pooled, [-2], like=pool)


def _whole(m: Match, editor: Editor) -> Node | Skip:
    """Of one window over the whole image: the delegate averages that much faster."""
    pool, shape = m.anchor, m["x"].meta["val"].shape
    given = arguments(pool)
    kernel, padding = (each_axis(given[name], 2) for name in ("kernel_size", "padding"))
    if list(shape[-2:]) != kernel or any(padding) or given["divisor_override"] is not None:
        return Skip("its windows are parts of the image, or divide by another number")
    return editor.call(aten.adaptive_avg_pool2d.default, m["x"], [1, 1], like=pool)


WHOLE_POOL = Rule("whole pool", find=Op(AVG_POOL2D, Var("x")), build=_whole)


POOL1D = Rule("pool1d", find=Op(one_of(MAX_POOL1D, AVG_POOL1D), Var("x")), build=_pool_images)
"""The delegate pools images."""


def _more_than_depthwise(gm: GraphModule, node: Node) -> str:
    if is_depthwise(node):
        return ""
    return "XNNPACK has kernels of transposed convolutions that sum channels"


shuffle_depthwise = shuffle_upsampling(_more_than_depthwise)
"""XNNPACK computes depthwise transposed convolutions one channel at a time
(`benchmarks/delegated_functions.py`)."""


@graph_pass(needs=(HAS_VALUES,), gives=())
def numbers_as_constants(gm: GraphModule) -> PassResult:
    """Turn the number in a sum, product or quotient that will run in integers into a constant.

    Before:  mul(x, 0.5);       div(x, 6.0)
    After:   mul(x, _number);   mul(x, _number), the number 1/6
    """
    editor = Editor(gm)
    notes = []
    for node in list(gm.graph.nodes):
        if not is_call(node, (*ADD, *SUB, *MUL, *DIV)) or KEEP_FLOAT_KEY in node.meta:
            continue
        x, number = node.args[0], node.args[1]
        if not isinstance(x, Node) or not isinstance(number, (int, float)) or number == 0:
            continue
        if not _is_float32(x) or any(k != "alpha" or v != 1 for k, v in node.kwargs.items()):
            continue
        divides = is_call(node, DIV)
        value = torch.tensor(1.0 / number if divides else float(number))
        constant = editor.constant(f"{node.name}_number", value, like=node)
        target = aten.mul.Tensor if divides else node.target
        made = editor.call(target, x, constant, like=node, val=node.meta["val"])
        editor.replace(node, made)
        notes.append(Note(node.name, f"{number} is a constant tensor"))
    return PassResult(editor.finish(), tuple(notes))


def _is_float32(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype is torch.float32
