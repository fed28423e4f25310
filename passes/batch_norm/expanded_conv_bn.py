"""Conv and batch norm in training as the operators that torchao's PT2E writes out for them.

The weight is scaled by gamma / sqrt(running_var + eps) before it is fake-quantized, and the conv's
result is divided by that again before the batch norm (R. Krishnamoorthi, "Quantizing deep
convolutional networks for efficient inference", arXiv:1806.08342, section 3.2.2). Operators,
their order, and the arithmetic of folding at the end are those of torchao 0.18
(`quantization/pt2e/qat_utils.py`), so that results are equal to the bit.
`passes.trained_batch_norm` has the form of this package's own flow.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn.utils.fusion import fuse_conv_bn_weights

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import attribute
from pt2e_quant.graph.ops import (
    CONV1D,
    CONV2D,
    CONV_TRANSPOSE,
    CONV_TRANSPOSE1D,
    CONV_TRANSPOSE2D,
    Overloads,
    argument,
    arguments,
    aten,
    is_call,
)
from pt2e_quant.graph.pipeline import HAS_VALUES, PassResult, graph_pass
from pt2e_quant.passes.batch_norm.detach_batch_norm import drop_counters, set_arguments
from pt2e_quant.passes.qdq.remap_annotations import Remap, remap_annotations

_CONVS: Overloads = CONV1D + CONV2D + CONV_TRANSPOSE1D + CONV_TRANSPOSE2D
"""The kinds that torchao writes out; batch norms behind others train as they are."""

_NORM: Overloads = (aten.batch_norm.default,)


def expand_conv_bn(gm: GraphModule) -> dict[Node, Node]:
    """Write out each batch norm behind an annotated or float conv, after annotation.

    Before:  y = conv(x, w, b); z = batch_norm(y, gamma, beta, mean, var, …)
    After:   s = gamma / sqrt(var + eps); y = conv(x, w * s, zeros_like(b)) / s + b
             z = batch_norm(y, gamma, beta, mean, var, …)

    Annotations of the weight and the bias move to what the conv reads in their place.

    Returns:
        The scaled weights and zero biases, each with the constant that it is made of.
    """
    remap = Remap()
    sources: dict[Node, Node] = {}
    editor = Editor(gm)
    for norm in list(gm.graph.nodes):
        conv = _conv_before(norm)
        if conv is not None:
            _expand(editor, conv, norm, remap, sources)
    remap_annotations(gm.graph, remap)
    editor.finish()
    return sources


def _conv_before(norm: Node) -> Node | None:
    """The conv that a batch norm is to be written out with, None if there is none."""
    if not is_call(norm, _NORM):
        return None
    given = arguments(norm)
    state = [given[name] for name in ("weight", "bias", "running_mean", "running_var")]
    conv = given["input"]
    if not is_call(conv, _CONVS) or len(conv.users) > 1:
        return None
    constants = [*state, argument(conv, "weight")]
    if not all(isinstance(node, Node) and node.op == "get_attr" for node in constants):
        return None
    bias = argument(conv, "bias")
    if bias is not None and bias.op != "get_attr":
        return None
    # Groups of a transposed conv share the channels of its weight's second dimension.
    is_grouped = is_call(conv, CONV_TRANSPOSE) and int(argument(conv, "groups")) > 1
    return None if is_grouped else conv


def _expand(
    editor: Editor, conv: Node, norm: Node, remap: Remap, sources: dict[Node, Node]
) -> None:
    given = arguments(norm)
    weight, bias = argument(conv, "weight"), argument(conv, "bias")
    gamma, var = given["weight"], given["running_var"]
    for node in (gamma, var):
        if not node < conv:
            conv.prepend(node)

    def call(target: Any, *args: Any, before: Node = conv, **kwargs: Any) -> Node:
        return editor.call(target, *args, like=conv, before=before, **kwargs)

    rank = weight.meta["val"].dim()
    shape = [1] * rank
    shape[1 if is_call(conv, CONV_TRANSPOSE) else 0] = -1
    along = [1, -1, *[1] * (rank - 2)]
    std = call(aten.sqrt.default, call(aten.add.Tensor, var, given["eps"]))
    scale = call(aten.div.Tensor, gamma, std)
    scaled = call(aten.mul.Tensor, weight, call(aten.reshape.default, scale, shape))
    remap.edges[weight, conv] = scaled
    sources[scaled] = weight
    changes = {"weight": scaled}
    if bias is not None:
        dtype = conv.meta["val"].dtype
        zeros = call(aten.zeros_like.default, bias, dtype=dtype, pin_memory=False)
        remap.edges[bias, conv] = zeros
        sources[zeros] = bias
        changes["bias"] = zeros
    set_arguments(conv, **changes)
    value = call(aten.reshape.default, scale, along, before=norm)
    value = call(aten.div.Tensor, conv, value, before=norm)
    if bias is not None:
        value = call(
            aten.add.Tensor,
            value,
            call(aten.reshape.default, bias, along, before=norm),
            before=norm,
        )
    set_arguments(norm, input=value)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Expanded:
    """A conv and batch norm as `expand_conv_bn` wrote it, with observers inside.

    Args:
        norm: the batch norm.
        conv: the conv.
        divided: the division of its result.
        scaled: the multiplication of its weight.
        zeros: what it reads as bias; None if it has none.
        weight: the constant that is scaled.
        bias: the constant that is added behind it; None if there is none.
    """

    norm: Node
    conv: Node
    divided: Node
    scaled: Node
    zeros: Node | None
    weight: Node
    bias: Node | None


@graph_pass(needs=(HAS_VALUES,), gives=())
def fold_expanded_conv_bn(gm: GraphModule) -> PassResult:
    """Fold the batch norms that `expand_conv_bn` wrote out, under the observers' trained ranges.

    Before:  z = batch_norm(conv(x, fq(w * s), fq(zeros_like(b))) / s + b, …)
    After:   z = conv(x, fq(weight), fq(bias))

    Nothing counts batches any more.
    """
    editor = Editor(gm)
    drop_counters(gm)
    for node in list(gm.graph.nodes):
        found = _expanded_at(gm, node)
        if found is not None:
            _fold(editor, found)
    return PassResult(editor.finish())


def _expanded_at(gm: GraphModule, norm: Node) -> _Expanded | None:
    if not is_call(norm, _NORM):
        return None
    value = argument(norm, "input")
    bias = None
    if is_call(value, (aten.add.Tensor,)):
        bias = _read_as(value.args[1], aten.reshape.default)
        value = value.args[0]
    if not isinstance(value, Node) or not is_call(value, (aten.div.Tensor,)):
        return None
    conv = _behind_modules(gm, value.args[0])
    if not is_call(conv, _CONVS):
        return None
    scaled = _behind_modules(gm, argument(conv, "weight"))
    weight = _read_as(scaled, aten.mul.Tensor)
    zeros = argument(conv, "bias")
    if weight is None or (zeros is None) != (bias is None):
        return None
    return _Expanded(
        norm=norm,
        conv=conv,
        divided=value,
        scaled=scaled,
        zeros=None if zeros is None else _behind_modules(gm, zeros),
        weight=weight,
        bias=bias,
    )


def _read_as(node: Any, target: Any) -> Node | None:
    """The constant that a call of an operator takes first, else None."""
    if not isinstance(node, Node) or not is_call(node, (target,)):
        return None
    source = node.args[0]
    return source if isinstance(source, Node) and source.op == "get_attr" else None


def _behind_modules(gm: GraphModule, node: Any) -> Any:
    """The value behind a chain of observers and fake-quantizes."""
    while isinstance(node, Node) and node.op == "call_module":
        if not hasattr(attribute(gm, str(node.target)), "calculate_qparams"):
            break
        node = node.args[0]
    return node


def _fold(editor: Editor, found: _Expanded) -> None:
    weight, bias = _folded(editor.gm, found)
    conv, zeros, result = found.conv, found.zeros, found.divided.args[0]
    assert isinstance(result, Node)  # _expanded_at asks for it
    found.norm.replace_all_uses_with(result)
    editor.erase_dead([found.norm])
    if found.bias is None or zeros is None:
        owner = str(found.weight.target).rpartition(".")[0]
        name = f"{owner}.bias" if owner else "bias"
        set_arguments(conv, bias=editor.constant(name, bias, like=conv))
    else:
        zeros.replace_all_uses_with(editor.rebind(found.bias, bias, reader=zeros))
        editor.erase_dead([zeros])
    found.scaled.replace_all_uses_with(editor.rebind(found.weight, weight, reader=found.scaled))
    editor.erase_dead([found.scaled])
    editor.changed = True


def _folded(gm: GraphModule, found: _Expanded) -> tuple[Tensor, Tensor]:
    given = arguments(found.norm)

    def held(node: Any) -> Any:
        """A constant as it is at the end of training; `_conv_before` asked for get_attr nodes."""
        return None if node is None else attribute(gm, str(node.target)).detach()

    state = {n: held(given[n]) for n in ("weight", "bias", "running_mean", "running_var")}
    with torch.no_grad():
        made = fuse_conv_bn_weights(
            held(found.weight),
            held(found.bias),
            state["running_mean"],
            state["running_var"],
            float(given["eps"]),
            state["weight"],
            state["bias"],
            transpose=is_call(found.conv, CONV_TRANSPOSE),
        )
    return made[0].detach(), made[1].detach()
