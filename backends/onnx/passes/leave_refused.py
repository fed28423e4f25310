"""Operators that ONNX Runtime refused, computed otherwise, or slower, in integers: float ones."""

import math

import torch
from torch.fx import GraphModule, Node

from pt2e_quant.backends.onnx.shape_classes import LEAST_LEFT, MOST_LEFT, ratio_here, shape_class
from pt2e_quant.backends.target.float_retries import leave_of
from pt2e_quant.core.qdq import is_dequantize, is_quantize
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.ops import CLAMP, HARDTANH, RELU, RELU6, aten, is_call
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass
from pt2e_quant.kernels.shape_classes import expected_sizes
from pt2e_quant.passes.qdq.remove_qdq import fold_dequantize

_BYTES = (torch.uint8, torch.int8)
_CLIPS = (*RELU, *RELU6, *HARDTANH, *CLAMP)


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
    for node in list(gm.graph.nodes):
        reads = _computed(gm, node)
        ratio = ratio_here(node) if reads and _is_rounded(node) else None
        if ratio is None or ratio >= MOST_LEFT or _elements(node) < LEAST_LEFT:
            continue
        for read in reads:
            _keep_apart(editor, read, node)
        notes.append(
            Note(
                node.name,
                f"in integers it measured {ratio:.2f} times as fast ({shape_class(node)})",
            )
        )
    return PassResult(editor.finish(), tuple(notes))


def _computed(gm: GraphModule, node: Node) -> list[Node]:
    """The dq from 8 bits of computed values that an operator reads; none if it reads floats too."""
    found = []
    for read in node.all_input_nodes if node.op == "call_function" else ():
        source = read.args[0] if is_dequantize(read) else read
        if not isinstance(source, Node) or constant_of(gm, source) is not None:
            continue
        if source is read or source.meta["val"].dtype not in _BYTES:
            return []
        found.append(read)
    return found


def _elements(node: Node) -> int:
    """Of a result whose class is known, symbolic sizes as in the example inputs."""
    return math.prod(expected_sizes(node.meta["val"].shape) or (0,))


def _is_rounded(node: Node) -> bool:
    """Whether all that reads a result, behind clips, is a quantize."""
    return all(is_quantize(u) or (is_call(u, _CLIPS) and _is_rounded(u)) for u in node.users)


def _keep_apart(editor: Editor, read: Node, node: Node) -> None:
    apart = editor.call(aten.maximum.default, read, read, like=read, before=node)
    node.replace_input_with(read, apart)
    editor.changed = True
