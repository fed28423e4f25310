"""Write per-channel affines (batch norms without a convolution before them) as convolutions."""

from collections.abc import Collection

from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_nodes, source_constant
from pt2e_quant.graph.op_table import KEEP_FLOAT_KEY
from pt2e_quant.graph.ops import ADD, MUL, argument, aten, is_call
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass
from pt2e_quant.passes.batch_norm.fold_affines import ChannelOperands, channel_operands

_CONVS = {3: aten.conv1d.default, 4: aten.conv2d.default}
"""Convolutions by the rank of what they read."""


@graph_pass(needs=(HAS_VALUES,), gives=())
def affines_as_convs(gm: GraphModule) -> PassResult:
    """Write x * scale + shift per channel as a depthwise convolution with one weight per channel.

    In integers the product would be rounded, and scale and shift to one step for all channels. A
    convolution has a step for each channel, so that its weights are exact, and rounds once, after
    the clip behind it. Operators that stay float (`place_integer_regions`) are left.

    Before:  y = add(mul(x[N, C, H, W], scale[C, 1, 1]), shift[C, 1, 1])
    After:   y = conv2d(x, scale[C, 1, 1, 1], shift[C], groups=C)
    """
    editor, notes = Editor(gm), []
    constants = constant_nodes(gm.graph)
    for node in [n for n in gm.graph.nodes if is_call(n, MUL)]:
        product = _operands(gm, node, constants)
        if product is None:
            continue
        reader = next(iter(node.users))
        added = _operands(gm, reader, constants) if _is_plain_sum(node) else None
        last = node if added is None else reader
        if any(KEEP_FLOAT_KEY in n.meta for n in (node, last, *last.users)):
            notes.append(Note(node.name, "it stays float", skipped=True))
            continue
        channels, rank = len(product.values), len(product.x.meta["val"].shape)
        ones, zeros = [1] * (rank - 2), [0] * (rank - 2)
        weight = product.values.view(-1, 1, *ones)
        stored = [_stored(editor, product, weight, node), None]
        if added is not None:
            stored[1] = _stored(editor, added, added.values, last)
        options = ones, zeros, ones, channels
        made = editor.call(_CONVS[rank], product.x, *stored, *options, like=last, before=last)
        editor.replace(last, made)
        notes.append(Note(node.name, f"a depthwise convolution of {channels} channels"))
    return PassResult(changed=editor.finish(), notes=tuple(notes))


def _operands(gm: GraphModule, node: Node, constants: Collection[Node]) -> ChannelOperands | None:
    """The operands of a product or sum per channel, None for anything else."""
    found = channel_operands(gm, node, 1, constants) if node.users else None
    if found is None:
        return None
    shape = found.x.meta["val"].shape
    return found if len(shape) in _CONVS and len(found.values) == shape[1] > 1 else None


def _is_plain_sum(product: Node) -> bool:
    """True if a product is read by a sum alone, unscaled."""
    reader, *others = product.users
    return not others and is_call(reader, ADD) and argument(reader, "alpha") == 1


def _stored(editor: Editor, found: ChannelOperands, tensor: Tensor, reader: Node) -> Node:
    if found.constant.op == "get_attr":
        return editor.rebind(found.constant, tensor.clone(), reader=reader)
    source = source_constant(found.constant)
    name = found.constant.name if source is None else str(source.target)
    return editor.constant(name, tensor.clone(), like=reader)
