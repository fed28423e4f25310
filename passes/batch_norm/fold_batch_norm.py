"""Fold batch norms into the conv or linear before them, in inference and at the end of training."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.core.errors import InvariantError
from pt2e_quant.core.output_moments import OUTPUT_MOMENTS_KEY, OutputMoments
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_of, source_constant
from pt2e_quant.graph.ops import (
    BATCH_NORM,
    CONV,
    CONV_TRANSPOSE,
    LINEAR,
    argument,
    arguments,
    aten,
    is_call,
    is_getitem,
)
from pt2e_quant.graph.pattern import Match, Op
from pt2e_quant.graph.pipeline import HAS_VALUES, Invariant, PassResult, graph_pass
from pt2e_quant.graph.rewrite import Rule, Skip, rewrite
from pt2e_quant.passes.batch_norm.norm_producer import PRODUCER, channel_follows, other_results_used
from pt2e_quant.passes.batch_norm.trained_batch_norm import FoldedConstants, TrainedBatchNorm


@dataclass(frozen=True, slots=True)
class Affine:
    """A batch norm as arithmetic per channel: y = x * scale + shift, float64[C] all.

    The moments are those of y on the data that the norm was trained with.
    """

    scale: Tensor
    shift: Tensor
    moments: OutputMoments


def is_training(norm: Node) -> bool:
    """True if a batch norm uses the batch's own statistics."""
    if is_call(norm, (aten._batch_norm_with_update.default,)):
        return True
    return bool(arguments(norm).get("training", False))


def affine_of(gm: GraphModule, norm: Node) -> Affine | Skip:
    """A batch norm as a per-channel affine, in float64.

    scale = weight / sqrt(running_var + eps), shift = bias - running_mean * scale
    (Ioffe and Szegedy 2015, section 3.1).
    """
    if is_training(norm):
        return Skip("batch_norm is in training mode: export the model after eval()")
    given = arguments(norm)
    found: dict[str, Tensor] = {}
    for name in ("running_mean", "running_var", "weight", "bias"):
        value = given[name]
        if value is None and name in ("running_mean", "running_var"):
            return Skip("batch_norm has no running statistics")
        if value is None:
            continue
        tensor = constant_of(gm, value)
        if tensor is None:
            return Skip(f"{name} of batch_norm is computed at run time")
        found[name] = tensor.double()
    eps = given["eps"] if "eps" in given else given["epsilon"]
    scale = torch.rsqrt(found["running_var"] + eps)
    if "weight" in found:
        scale = scale * found["weight"]
    shift = -found["running_mean"] * scale
    beta, gamma = torch.zeros_like(shift), torch.ones_like(shift)
    if "bias" in found:
        beta = found["bias"]
        shift = shift + beta
    return Affine(scale, shift, OutputMoments(beta, found.get("weight", gamma).abs()))


def scaled_weight(conv: Node, weight: Tensor, scale: Tensor) -> Tensor:
    """A conv's or linear's weight with each output channel multiplied by its scale."""
    scale = scale.to(torch.promote_types(weight.dtype, torch.float32))
    trailing = [1] * (weight.dim() - 2)
    if is_call(conv, CONV_TRANSPOSE):
        # weight[in, out / groups, ...]: the inputs of a group come together
        groups = int(argument(conv, "groups"))
        inputs, outputs = weight.shape[0] // groups, weight.shape[1]
        scale = scale.view(groups, 1, outputs).expand(groups, inputs, outputs)
        factor = scale.reshape(groups * inputs, outputs, *trailing)
    else:
        factor = scale.view(-1, 1, *trailing)
    return torch.mul(weight, factor).to(weight.dtype)


def why_not_foldable(producer: Node, is_constant: Callable[[Node], bool]) -> str | None:
    """The reason why a conv or linear cannot be given other constants, None if it can."""
    if len(producer.users) > 1:
        return f"{producer.name} is read by {len(producer.users)} nodes"
    return why_constants_stay(producer, is_constant)


def why_constants_stay(layer: Node, is_constant: Callable[[Node], bool]) -> str | None:
    """The reason why a conv or linear keeps its weight and bias, None if there is none."""
    for name in ("weight", "bias"):
        node = argument(layer, name)
        if node is None:
            continue
        if not is_constant(node):
            return f"{name} of {layer.name} is computed at run time"
        source = source_constant(node)
        for reader in _final_readers(source):
            if reader is not layer and is_call(reader, CONV + CONV_TRANSPOSE + LINEAR):
                return f"{source} of {layer.name} is shared with {reader.name}"
    return None


def _final_readers(source: Node | None) -> Iterable[Node]:
    """The nodes that read a constant, also through views of it."""
    stack = [] if source is None else list(source.users)
    while stack:
        node = stack.pop()
        yield node
        if source_constant(node) is not None:
            stack.extend(node.users)


def _fold(m: Match, editor: Editor) -> Node | Skip:
    producer, norm = m.nodes["producer"], m.nodes["bn"]
    affine = affine_of(editor.gm, norm)
    if isinstance(affine, Skip):
        return affine
    reason = why_not_foldable(producer, m.walk.is_constant)
    if reason is None and not channel_follows(producer, norm):
        reason = f"the normalised dimension is not the output channel of {producer.name}"
    if reason is None:
        fold_into(editor, producer, affine.scale, affine.shift)
        producer.meta[OUTPUT_MOMENTS_KEY] = affine.moments
        return editor.now(argument(norm, "input"))
    editor.decline(f"left as a per-channel affine: {reason}")
    return _affine_node(m, editor, affine)


def fold_into(editor: Editor, producer: Node, scale: Tensor, shift: Tensor) -> None:
    """Let a conv or linear compute y * scale + shift, float64[C] both, instead of y."""
    weight, bias = constants_of(editor, producer)
    bias = shift if bias is None else shift + bias.double() * scale
    set_constants(editor, producer, scaled_weight(producer, weight, scale), bias)
    moments: OutputMoments | None = producer.meta.get(OUTPUT_MOMENTS_KEY)
    if moments is not None:
        producer.meta[OUTPUT_MOMENTS_KEY] = moments.mapped(scale, shift)


def constants_of(editor: Editor, layer: Node) -> tuple[Tensor, Tensor | None]:
    """The weight and bias of a conv or linear that `why_constants_stay` found no reason for."""
    given = arguments(layer)
    weight = constant_of(editor.gm, given["weight"])
    assert weight is not None
    return weight, None if given["bias"] is None else constant_of(editor.gm, given["bias"])


def set_constants(editor: Editor, layer: Node, weight: Tensor, bias: Tensor) -> None:
    """Give a conv or linear another weight and bias; the bias takes the weight's dtype."""
    given = arguments(layer)
    new_weight, new_bias = _store(editor, given["weight"], weight, layer), bias.to(weight.dtype)
    if given["bias"] is not None:
        bias_node = _store(editor, given["bias"], new_bias, layer)
    else:
        owner = _owner_name(given["weight"])
        bias_node = editor.constant(f"{owner}bias", new_bias, like=layer)
    kept = {k: v for k, v in layer.kwargs.items() if k not in ("input", "weight", "bias")}
    layer.args = (given["input"], new_weight, bias_node, *layer.args[3:])
    layer.kwargs = kept


def _store(editor: Editor, node: Node, tensor: Tensor, reader: Node) -> Node:
    """The constant that takes the place of a constant, or of a view of one, for one reader."""
    if node.op == "get_attr":
        return editor.rebind(node, tensor, reader=reader)
    source = source_constant(node)
    assert source is not None  # node is constant
    editor.discard([node])
    return editor.constant(str(source.target), tensor, like=reader)


def _owner_name(node: Node) -> str:
    """The dotted name of the module that holds a constant, with a final dot; "" at the root."""
    source = source_constant(node)
    target = "" if source is None else str(source.target)
    return target[: target.rfind(".") + 1]


def _affine_node(m: Match, editor: Editor, affine: Affine) -> Node:
    norm, anchor = m.nodes["bn"], m.anchor
    given = arguments(norm)
    value = given["input"].meta["val"]
    shape = [-1] + [1] * (value.dim() - 2)
    result = editor.now(given["input"])
    owner = _owner_name(given["running_mean"])
    for target, name, tensor in (
        (aten.mul.Tensor, "weight", affine.scale),
        (aten.add.Tensor, "bias", affine.shift),
    ):
        constant = tensor.to(value.dtype).view(shape)
        if given[name] is None:
            node = editor.constant(f"{owner}{name}", constant, like=norm)
        else:
            node = _store(editor, given[name], constant, norm)
        result = editor.call(target, result, node, like=norm, val=anchor.meta["val"])
    return result


def _as_affine(m: Match, editor: Editor) -> Node | Skip:
    affine = affine_of(editor.gm, m.nodes["bn"])
    return affine if isinstance(affine, Skip) else _affine_node(m, editor, affine)


def _unless_more_results(
    build: Callable[[Match, Editor], Node | Skip],
) -> Callable[[Match, Editor], Node | Skip]:
    def checked(m: Match, editor: Editor) -> Node | Skip:
        if m.anchor is not m.nodes["bn"] and other_results_used(m):
            return Skip("the saved statistics of batch_norm are used")
        return build(m, editor)

    return checked


RULES = (
    Rule(
        "folded into the weight", Op(BATCH_NORM, PRODUCER, name="bn"), _unless_more_results(_fold)
    ),
    Rule("made a per-channel affine", Op(BATCH_NORM, name="bn"), _unless_more_results(_as_affine)),
)


def _check(gm: GraphModule) -> str | None:
    left = [
        node.name
        for node in gm.graph.nodes
        if is_call(node, BATCH_NORM)
        and not is_training(node)
        and all(n.op == "get_attr" for n in node.all_input_nodes[1:])
    ]
    return f"{', '.join(left[:3])} left" if left else None


no_batch_norm = Invariant("no inference-mode batch_norm of constants is left", _check)


@graph_pass(needs=(HAS_VALUES,), gives=(no_batch_norm,))
def fold_batch_norm(gm: GraphModule) -> PassResult:
    """Fold each inference-mode batch_norm into the conv or linear before it.

    Where it cannot be folded (the conv has other readers, a weight is shared, nothing to fold
    into) it becomes a multiplication and an addition per channel. Tensors that the module held
    are never written: names are bound to new ones.

    Before:  y = batch_norm(conv2d(x, w, b), weight, bias, mean, var, eps)
    After:   y = conv2d(x, w * k, (b - mean) * k + bias),   k = weight / sqrt(var + eps)
    """
    return rewrite(gm, RULES)


@graph_pass(needs=(HAS_VALUES,), gives=())
def fold_trained_batch_norm(gm: GraphModule) -> PassResult:
    """Store the weights and biases that trained batch norms give, by the same operations.

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
