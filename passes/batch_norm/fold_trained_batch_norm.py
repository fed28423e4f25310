"""End of training: batch norm modules become folded constants, and batch_norm operators."""

from typing import Any

import torch
from torch.fx import GraphModule, Node

from pt2e_quant.core.errors import InvariantError
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_of, source_constant
from pt2e_quant.graph.ops import aten, is_getitem
from pt2e_quant.graph.pipeline import HAS_VALUES, PassResult, graph_pass
from pt2e_quant.passes.batch_norm.trained_batch_norm import FoldedConstants, TrainedBatchNorm


@graph_pass(needs=(HAS_VALUES,), gives=())
def fold_trained_batch_norm(gm: GraphModule) -> PassResult:
    """Store what the trained batch norms make of weights and biases, by the same operations.

    Before:  f = conv_bn_0_fold(w, b, …); y = conv2d(x, f[0], f[1]); z = conv_bn_0_norm(y, …)
    After:   z = conv2d(x, weight, bias)

    Batch norms that are not behind a conv or linear become batch_norm in inference.
    """
    editor = Editor(gm)
    folds: list[tuple[Node, FoldedConstants]] = []
    norms: list[tuple[Node, TrainedBatchNorm]] = []
    for node in gm.graph.nodes:
        if node.op != "call_module":
            continue
        module = gm.get_submodule(str(node.target))
        if isinstance(module, FoldedConstants):
            folds.append((node, module))
        elif isinstance(module, TrainedBatchNorm):
            norms.append((node, module))
    for node, norm in norms:
        _end_norm(editor, node, norm)
    for node, fold in folds:
        _end_fold(editor, node, fold)
    editor.changed = bool(folds or norms)
    return PassResult(editor.finish())


def _end_norm(editor: Editor, node: Node, norm: TrainedBatchNorm) -> None:
    x, _, _, gamma, beta, mean, var, _ = node.args
    assert isinstance(x, Node)
    if norm.is_folded:
        node.replace_all_uses_with(x)
    else:
        made = editor.call(
            aten.batch_norm.default,
            *(x, gamma, beta, mean, var, False, norm.momentum, norm.eps, True),
            like=node,
            val=node.meta["val"],
        )
        node.replace_all_uses_with(made)
    _erase(editor, node)


def _erase(editor: Editor, node: Node) -> None:
    target = str(node.target)
    inputs = node.all_input_nodes
    editor.graph.erase_node(node)
    editor.gm.delete_submodule(target)
    editor.erase_dead([n for n in inputs if n.op == "get_attr" or is_getitem(n)])


def _end_fold(editor: Editor, node: Node, fold: FoldedConstants) -> None:
    fold.eval()
    with torch.no_grad():
        values = fold(*(_value(editor.gm, argument) for argument in node.args))
    parts: dict[Any, Node] = {u.args[1]: u for u in node.users if is_getitem(u)}
    weight, bias = node.args[:2]
    assert isinstance(weight, Node)
    owner = _name(weight).rpartition(".")[0]
    held = {0: weight, 1: bias if isinstance(bias, Node) else None}
    for position, source in held.items():
        part = parts.pop(position, None)
        if part is None:
            continue
        tensor = values[position]
        if source is not None and source.op == "get_attr":
            constant = editor.rebind(source, tensor, reader=node)
        else:
            name = "weight" if position == 0 else "bias"
            constant = editor.constant(f"{owner}.{name}" if owner else name, tensor, like=part)
        part.replace_all_uses_with(constant)
        editor.graph.erase_node(part)
    for part in parts.values():
        editor.graph.erase_node(part)
    held_nodes = [n for n in node.all_input_nodes if not set(n.users) - {node}]
    editor.graph.erase_node(node)
    editor.gm.delete_submodule(str(node.target))
    editor.erase_dead([n for n in held_nodes if n.op == "get_attr" and not n.users])


def _value(gm: GraphModule, argument: Any) -> Any:
    if not isinstance(argument, Node):
        return argument
    value = constant_of(gm, argument)
    if value is None:
        raise InvariantError(f"{argument.name} is no constant any more", node=argument)
    return value


def _name(node: Node) -> str:
    source = source_constant(node)
    return node.name if source is None else str(source.target)
