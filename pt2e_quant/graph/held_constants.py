"""The value and the bytes of constants, also of double-quantized scales."""

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from pt2e_quant.core.formats.format_ops import DequantizeBlock
from pt2e_quant.graph.meta import constant_of


def held_constant(gm: GraphModule, node: Node) -> Tensor | None:
    """The constant value of a node, also of the dequantize of double-quantized scales.

    None if it is computed from an input. Not for weights: a dequantized weight is no constant.
    """
    found = constant_of(gm, node)
    if found is not None or node.op != "call_function":
        return found
    if node.target not in (DequantizeBlock, torch.ops.aten.view.default):
        return None
    inputs = {source: held_constant(gm, source) for source in node.all_input_nodes}
    if any(value is None for value in inputs.values()):
        return None
    target: Any = node.target
    with torch.no_grad():
        result: Tensor = target(*map_arg(node.args, inputs.__getitem__))
    return result


def held_bytes(gm: GraphModule, node: Node) -> int:
    """The bytes of the constants that a node is computed from."""
    if node.op == "get_attr":
        value = constant_of(gm, node)
        return 0 if value is None else value.numel() * value.element_size()
    return sum(held_bytes(gm, source) for source in node.all_input_nodes)
