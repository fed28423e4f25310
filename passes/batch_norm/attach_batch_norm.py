"""Put trainable batch norms behind the convs and linears that `detach_batch_norm` took them from.

Annotations move to the new nodes: those of a weight and a bias to the folded ones, that of an
output to the batch norm's.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from pt2e_quant.core.specs import Q_ANNOTATION_KEY
from pt2e_quant.graph.meta import copy_trace
from pt2e_quant.graph.ops import CONV_TRANSPOSE, arguments, is_call
from pt2e_quant.passes.batch_norm.detach_batch_norm import (
    DetachedNorm,
    add_module,
    call_module,
    set_arguments,
)
from pt2e_quant.passes.batch_norm.norm_producer import channel_dim
from pt2e_quant.passes.batch_norm.trained_batch_norm import (
    FoldedConstants,
    TrainedBatchNorm,
    WeightLayout,
)
from pt2e_quant.passes.qdq.remap_annotations import Remap, remap_annotations


def attach_batch_norms(gm: GraphModule, norms: Sequence[DetachedNorm]) -> dict[Node, Node]:
    """Insert the modules that fold and normalise.

    Before:  y = conv2d(x, w, b)
    After:   w_b_s = conv_bn_0_fold(w, b, …); y = conv2d(x, w_b_s[0], w_b_s[1])
             z = conv_bn_0_norm(y, w_b_s[2], b, …)

    Returns:
        The folded weights and biases, each with the constant that it is made of.
    """
    remap = Remap()
    sources: dict[Node, Node] = {}
    for number, norm in enumerate(norms):
        _attach(gm, norm, f"conv_bn_{number}", remap, sources)
    remap_annotations(gm.graph, remap)
    return sources


def _attach(
    gm: GraphModule, norm: DetachedNorm, name: str, remap: Remap, sources: dict[Node, Node]
) -> None:
    producer = norm.producer
    given = arguments(producer)
    weight, stand_in = given["weight"], given["bias"]
    bias = stand_in if norm.has_bias else None
    is_quantized = _is_quantized(producer, weight)
    state = [_standing_before(producer, node) for node in norm.state.values()]
    new_weight, new_bias, scale = _fold(gm, norm, name, is_quantized, (weight, bias, *state[:4]))
    set_arguments(producer, weight=new_weight, bias=new_bias)
    module = TrainedBatchNorm(
        norm.momentum,
        norm.eps,
        channel_dim=channel_dim(producer),
        is_folded=True,
        is_quantized=is_quantized,
    )
    target = add_module(gm, f"{name}_norm", module)
    with gm.graph.inserting_after(producer):
        args = (producer, scale, bias, *state)
        after = call_module(gm.graph, target, args, producer, producer.meta["val"])
    after.meta.update((k, v) for k, v in norm.trace.items() if k != Q_ANNOTATION_KEY)
    after.meta["val"] = producer.meta["val"]
    producer.replace_all_uses_with(after, lambda user: user is not after)
    remap.edges[weight, producer] = new_weight
    remap.edges[stand_in, producer] = new_bias
    remap.outputs[producer] = after
    sources[new_weight] = weight
    sources[new_bias] = stand_in


def _is_quantized(producer: Node, weight: Node) -> bool:
    annotation = producer.meta.get(Q_ANNOTATION_KEY)
    spec = None if annotation is None else annotation.input_qspec_map.get(weight)
    # float32 is how Quantizers write "stays float".
    return spec is not None and getattr(spec, "dtype", None) is not torch.float32


def _standing_before(place: Node, node: Node | None) -> Node | None:
    """A constant's node, read anew if it is gone, moved in front of a place if it is behind it."""
    if node is None:
        return None
    if node._erased:
        with place.graph.inserting_before(place):
            made = place.graph.get_attr(str(node.target))
        made.meta.update(node.meta)
        return made
    if not node < place:
        place.prepend(node)
    return node


def _fold(
    gm: GraphModule, norm: DetachedNorm, name: str, is_quantized: bool, args: tuple[Any, ...]
) -> tuple[Node, Node, Node]:
    """The folded weight, the folded bias and the scale, as nodes before the producer."""
    producer, weight = norm.producer, args[0]
    target = add_module(
        gm, f"{name}_fold", FoldedConstants(_layout(producer), norm.eps, is_quantized)
    )
    per_channel = args[4].meta["val"]
    values = (weight.meta["val"], per_channel, per_channel)
    with gm.graph.inserting_before(producer):
        made = call_module(gm.graph, target, args, producer, values)
        parts = [gm.graph.call_function(operator.getitem, (made, i)) for i in range(3)]
    for part, value in zip(parts, values, strict=True):
        part.meta["val"] = value
        copy_trace(part, producer)
    return parts[0], parts[1], parts[2]


def _layout(producer: Node) -> WeightLayout:
    given = arguments(producer)
    is_transposed = is_call(producer, CONV_TRANSPOSE)
    return WeightLayout(
        rank=int(given["weight"].meta["val"].dim()),
        groups=int(given["groups"]) if is_transposed else 1,
        is_transposed=is_transposed,
    )
