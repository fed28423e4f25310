"""Give quantize and dequantize nodes the metadata of the operators that they belong to."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from pt2e_quant.core.qdq import CHOOSE_QPARAMS_OPS, is_dequantize, is_quantize
from pt2e_quant.core.specs import Q_ANNOTATION_KEY, is_valid_annotation
from pt2e_quant.graph.ops import VIEWS, is_call

_PORTED = ("stack_trace", "quantization_tag")
_SIZES = (
    torch.ops.aten.sym_size.default,
    torch.ops.aten.sym_size.int,
    torch.ops.aten.sym_size,
    torch.ops.aten.sym_numel.default,
    torch.ops.aten.sym_numel,
)


def readers_of_values(node: Node) -> list[Node]:
    """The readers of a node's values, without those of its size."""
    return [user for user in node.users if user.target not in _SIZES]


def is_annotated(node: Node) -> bool:
    """True if a node has an annotation with at least one spec."""
    return is_valid_annotation(node.meta.get(Q_ANNOTATION_KEY))


def is_dynamic(dequantize: Node) -> bool:
    """True if a dequantize reads qparams computed at run time."""
    return isinstance(dequantize.args[1], Node) and dequantize.args[1].op == "call_function"


def port_metadata(gm: GraphModule) -> bool:
    """Give each q/dq the stack trace and tag of the annotated operator that it belongs to.

    A dequantize and a dynamic choose_qparams and quantize belong to the operator that reads
    them, a static quantize to the one that made its input, and one of a weight to the weight.
    """
    changed = False
    for node in gm.graph.nodes:
        if not is_annotated(node):
            continue
        annotation = node.meta[Q_ANNOTATION_KEY]
        for source in (n for n in node.all_input_nodes if is_dequantize(n)):
            wanted = annotation.input_qspec_map
            if _origin(source) in wanted or _from_constant(source):
                changed |= _port_to_input(source, node)
        if annotation.output_qspec is not None:
            for user in (u for u in readers_of_values(node) if is_quantize(u)):
                changed |= _port(user, node)
    return changed


def _origin(node: Node) -> Node:
    """The node at the start of a chain of q/dq."""
    while (is_dequantize(node) or is_quantize(node)) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _from_constant(node: Node) -> bool:
    """True if a dequantize reads stored integers: the float weight it was annotated by is gone."""
    return _origin(node).op == "get_attr"


def _port_to_input(dequantize: Node, reader: Node) -> bool:
    changed = _port(dequantize, reader)
    quantize = dequantize.args[0]
    if not isinstance(quantize, Node) or not is_quantize(quantize):
        return changed
    if is_dynamic(dequantize):
        for node in (quantize, *_choosers(quantize)):
            changed |= _port(node, reader)
        return changed
    chain = _back_to_constant(quantize)
    for node in chain:
        changed |= _port(node, chain[-1].all_input_nodes[0])
    return changed


def _choosers(quantize: Node) -> Iterator[Node]:
    """The choose_qparams nodes that a dynamic quantize takes its qparams from."""
    for argument in quantize.args[1:3]:
        source: Any = argument.args[0] if isinstance(argument, Node) else None
        if isinstance(source, Node) and source.target in CHOOSE_QPARAMS_OPS:
            yield source


def _back_to_constant(quantize: Node) -> list[Node]:
    """A quantize and the views behind it, back to a constant; none if it reads another value."""
    found = [quantize]
    node = quantize.args[0]
    while isinstance(node, Node) and is_call(node, VIEWS):
        found.append(node)
        node = node.args[0]
    return found if isinstance(node, Node) and node.op == "get_attr" else []


def _port(node: Node, like: Node) -> bool:
    """Copy the metadata that like has; returns whether anything changed."""
    found = {key: like.meta[key] for key in _PORTED if key in like.meta}
    changed = any(node.meta.get(key) != value for key, value in found.items())
    node.meta.update(found)
    return changed
