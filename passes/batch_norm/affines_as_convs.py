"""Write per-channel affines, what batch norms without a convolution become, as convolutions."""

from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_nodes, constant_of, source_constant
from pt2e_quant.graph.op_table import KEEP_FLOAT_KEY
from pt2e_quant.graph.ops import ADD, MUL, argument, aten, is_call
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass

_CONVS = {3: aten.conv1d.default, 4: aten.conv2d.default}
"""Convolutions by the rank of what they read."""


@dataclass(frozen=True, slots=True)
class _Operands:
    """Of a product or sum: a computed tensor, and a constant with a value for each channel."""

    x: Node
    constant: Node
    values: Tensor


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


def _operands(gm: GraphModule, node: Node, constants: Collection[Node]) -> _Operands | None:
    """What a product or sum per channel reads, None if it is no such thing."""
    x, y = (argument(node, name) for name in ("self", "other"))
    if not isinstance(x, Node) or not isinstance(y, Node) or not node.users:
        return None
    if x in constants:
        x, y = y, x
    held = constant_of(gm, y) if y in constants and x not in constants else None
    shape = x.meta["val"].shape
    if held is None or len(shape) not in _CONVS or x.meta["val"].dtype != held.dtype:
        return None
    lengths = [1] * (len(shape) - held.dim()) + list(held.shape)
    channels = held.numel()
    is_per_channel = len(lengths) == len(shape) and lengths[1] == channels == shape[1] > 1
    return _Operands(x, y, held.reshape(-1)) if is_per_channel else None


def _is_plain_sum(product: Node) -> bool:
    """Whether a product is read by a sum alone, unscaled."""
    reader, *others = product.users
    return not others and is_call(reader, ADD) and argument(reader, "alpha") == 1


def _stored(editor: Editor, found: _Operands, tensor: Tensor, reader: Node) -> Node:
    if found.constant.op == "get_attr":
        return editor.rebind(found.constant, tensor.clone(), reader=reader)
    source = source_constant(found.constant)
    name = found.constant.name if source is None else str(source.target)
    return editor.constant(name, tensor.clone(), like=reader)
