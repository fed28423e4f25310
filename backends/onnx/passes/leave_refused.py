"""Operators that ONNX Runtime refused, computed otherwise, or slower, in integers: float ones."""

from torch.fx import GraphModule, Node

from pt2e_quant.backends.target.float_retries import leave_of
from pt2e_quant.backends.target.leave_slower import find_slower
from pt2e_quant.core.qdq import is_dequantize
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.ops import aten
from pt2e_quant.graph.pipeline import HAS_VALUES, PassResult, graph_pass
from pt2e_quant.passes.qdq.remove_qdq import fold_dequantize

_MOST_LEFT = 0.5
"""Operators below this ratio stay float. Float between integers adds operators that the ratio does
not count: a copy, and transposes where convolutions around it have channels last."""


@graph_pass(needs=(HAS_VALUES,), gives=())
def leave_refused(gm: GraphModule) -> PassResult:
    """Keep ONNX Runtime from computing what was refused in integers; values stay those of the q/dq.

    It looks for a dq in front of an operator. The maximum of a tensor and itself is the tensor, and
    no optimizer takes it out.

    Before:  linear(dq(x_q), dq(w_q))
    After:   linear(maximum(dq(x_q), dq(x_q)), w), w the float values of w_q
    """
    editor = Editor(gm)
    for node in [n for n in gm.graph.nodes if n.op == "call_function" and leave_of(n)]:
        for read in [n for n in node.all_input_nodes if is_dequantize(n)]:
            if isinstance(read.args[0], Node) and constant_of(gm, read.args[0]) is not None:
                fold_dequantize(gm, editor, read)
                continue
            _keep_apart(editor, read, node)
    return PassResult(editor.finish())


@graph_pass(needs=(HAS_VALUES,), gives=())
def leave_slower(gm: GraphModule) -> PassResult:
    """Keep ONNX Runtime from integer kernels that measured much slower than float ones here.

    Values stay those of the q/dq, and weights stay integers in the file. Dynamic sizes are judged
    as they are in the example inputs.

    Before:  q(avg_pool2d(dq(x_q)))
    After:   q(avg_pool2d(maximum(dq(x_q), dq(x_q))))
    """
    editor = Editor(gm)
    notes = []
    for slower in find_slower(gm, "onnx", most=_MOST_LEFT):
        for read in slower.reads:
            _keep_apart(editor, read, slower.node)
        notes.append(slower.note)
    return PassResult(editor.finish(), tuple(notes))


def _keep_apart(editor: Editor, read: Node, node: Node) -> None:
    apart = editor.call(aten.maximum.default, read, read, like=read, before=node)
    node.replace_input_with(read, apart)
    editor.changed = True
