"""Read the integers of an activation whose scale is chosen at run time off a runtime's product.

No runtime hands them out: a kernel quantizes its input and multiplies in one call. Behind a weight
that is one step at one place of each row and zero elsewhere, that call gives single integers times
known scales.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.backends.cut_graph import cut_behind
from pt2e_quant.core.packing import pack
from pt2e_quant.core.qdq import (
    STATIC_KINDS,
    QdqKind,
    is_dequantize,
    is_quantize,
    kind_of_qdq,
    read_qparams,
)
from pt2e_quant.core.qparams import QParams, dequantize, quantize
from pt2e_quant.core.unpack_op import is_unpack, unpacked_dtype
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.ops import CONV, LINEAR, arguments, is_call

_RUN_TIME = (QdqKind.PER_TENSOR_DYNAMIC, QdqKind.PER_TOKEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A graph that ends at a product which gives single integers of its input.

    Attributes:
        gm: its only result is the product.
        scale: the name of the node with the input's scale.
        steps: what one integer counts in each output, over the input's scale; shaped to broadcast.
    """

    gm: GraphModule
    scale: str
    steps: Tensor


def run_time_inputs(gm: GraphModule) -> dict[Node, str | None]:
    """The dequantizes of activations whose scales are chosen at run time, in graph order.

    Each with the reason why its integers cannot be read off a product; None if they can.
    """
    return {
        node: _reason_against(gm, node)
        for node in gm.graph.nodes
        if kind_of_qdq(node) in _RUN_TIME
        and is_dequantize(node)
        and isinstance(node.args[0], Node)
        and is_quantize(node.args[0])
    }


def _reason_against(gm: GraphModule, dequantized: Node) -> str | None:
    product = _product(dequantized)
    if product is None:
        return "no linear or convolution alone reads it"
    weight = arguments(product)["weight"]
    codes = weight.args[0] if isinstance(weight, Node) and is_dequantize(weight) else None
    held = codes.all_input_nodes[0] if isinstance(codes, Node) and is_unpack(codes) else codes
    if (
        not isinstance(held, Node)
        or held.op != "get_attr"
        or kind_of_qdq(weight) not in STATIC_KINDS
    ):
        return "the weight behind it is not made of plain integers"
    if read_qparams(gm, weight).zero_point.is_floating_point():
        return "the weight behind it has zero points that are no integers"
    return None


def _product(dequantized: Node) -> Node | None:
    readers = list(dequantized.users)
    if len(readers) != 1 or not is_call(readers[0], (*LINEAR, *CONV)):
        return None
    return readers[0] if arguments(readers[0])["input"] is dequantized else None


def probe(gm: GraphModule, dequantized: Node) -> Probe:
    """The graph up to the product behind an activation, with another weight in it.

    Before:  linear(dequantize(x_q, s, z), dequantize(w_q, …), bias)
    After:   linear(dequantize(x_q, s, z), dequantize(one_hot, …), zeros)

    Row n has one step at place n, or at places spread evenly if the input has more than the product
    has outputs; of a convolution's kernel in its middle.

    Args:
        gm: a canonical graph, which is not changed.
        dequantized: of `run_time_inputs`, without a reason against.
    """
    product = _product(dequantized)
    assert product is not None
    part = cut_behind(gm, product.name)
    editor = Editor(part)
    product = next(node for node in part.graph.nodes if node.name == product.name)
    given: dict[str, Any] = arguments(product)
    weight: Node = given["weight"]
    qparams = read_qparams(part, weight)
    values = constant_of(part, weight.args[0])  # type: ignore[arg-type]  # codes, see above
    assert values is not None
    codes = _one_hot(values, qparams)
    dequantize_node = _with_codes(editor, weight, codes)
    product.replace_input_with(weight, dequantize_node)
    bias = given.get("bias")
    if isinstance(bias, Node) and (held := constant_of(part, bias)) is not None:
        zeros = editor.constant("parity_bias", torch.zeros_like(held), like=bias)
        product.replace_input_with(bias, zeros)
    editor.changed = True
    editor.finish()
    part.graph.eliminate_dead_code()
    part.recompile()
    steps = dequantize(codes, qparams).flatten(1).sum(1)
    scale = given["input"].args[1]
    rank = codes.dim() - 2
    return Probe(gm=part, scale=scale.name, steps=steps.reshape(-1, *[1] * rank))


def _one_hot(codes: Tensor, qparams: QParams) -> Tensor:
    """Integers that stand for one step at one place of each row, and for zero elsewhere."""
    found = quantize(torch.zeros(codes.shape), qparams).to(codes.dtype)
    rows = found.flatten(1)
    count, width = codes.shape[:2]
    kernel = rows.shape[1] // max(1, width)
    numbers = torch.arange(count)
    channels = numbers * width // count if count < width else numbers % width
    places = (channels * kernel + kernel // 2).unsqueeze(1)
    zero = rows.gather(1, places).to(torch.int64)
    stepped = torch.where(zero < qparams.quant_max, zero + 1, zero - 1)
    rows.scatter_(1, places, stepped.to(rows.dtype))
    return rows.reshape(codes.shape)


def _with_codes(editor: Editor, weight: Node, codes: Tensor) -> Node:
    """A copy of a weight's dequantize that reads other integers, stored as its own are."""
    source = weight.args[0]
    assert isinstance(source, Node)
    graph = weight.graph
    held = source.all_input_nodes[0] if is_unpack(source) else source
    stored = pack(codes, unpacked_dtype(source)) if is_unpack(source) else codes
    made = editor.constant("parity_codes", stored, like=held)
    with graph.inserting_before(weight):
        if is_unpack(source):
            made = graph.node_copy(source, lambda node: made if node is held else node)
        return graph.node_copy(weight, lambda node: made if node is source else node)
