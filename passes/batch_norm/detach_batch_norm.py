"""Take batch norms out of a graph while it is annotated, and put trainable ones back.

A quantizer sees the graph that will be deployed: a conv or linear with the batch norm folded into
it. So one that knows nothing of batch norms annotates a graph for training as one for inference.
Annotations then move to the new nodes: those of a weight and a bias to the folded ones, that of
an output to the batch norm's.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from pt2e_quant.core.specs import Q_ANNOTATION_KEY
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import attribute, copy_trace
from pt2e_quant.graph.ops import BATCH_NORM, CONV_TRANSPOSE, argument, arguments, aten, is_call
from pt2e_quant.graph.pattern import Match, Op, find_matches
from pt2e_quant.passes.batch_norm.norm_producer import (
    PRODUCER,
    channel_dim,
    channel_follows,
    other_results_used,
)
from pt2e_quant.passes.batch_norm.trained_batch_norm import (
    FoldedConstants,
    TrainedBatchNorm,
    WeightLayout,
)
from pt2e_quant.passes.qdq.remap_annotations import Remap, remap_annotations

_PATTERNS = (
    ("behind a conv or linear", Op(BATCH_NORM, PRODUCER, name="bn")),
    ("alone", Op(BATCH_NORM, name="bn")),
)
_STATE = ("weight", "bias", "running_mean", "running_var")


@dataclass(frozen=True, slots=True, kw_only=True)
class DetachedNorm:
    """A batch norm, and the conv or linear that stands for both while the graph is annotated.

    Args:
        producer: the conv or linear; for a batch norm that stands alone, the value it reads.
        trace: the meta of the batch norm's node.
        state: weight, bias, running_mean, running_var and num_batches_tracked, as nodes.
        momentum: of the running statistics.
        eps: of the batch norm.
        is_folded: the producer is its conv or linear.
        has_bias: the conv or linear has a bias of its own.
    """

    producer: Node
    trace: dict[str, Any]
    state: dict[str, Node | None]
    momentum: float
    eps: float
    is_folded: bool
    has_bias: bool


def detach_batch_norms(gm: GraphModule) -> list[DetachedNorm]:
    """Take out every batch norm that is to be folded, and make modules of the others.

    Before:  y = conv2d(x, w); z = batch_norm(y, weight, bias, mean, var, …)
    After:   z = conv2d(x, w, bias)      where bias stands for the bias that folding gives
    """
    matches = find_matches(gm.graph, _PATTERNS, _accepts)
    editor = Editor(gm)
    found: list[DetachedNorm] = []
    alone: list[DetachedNorm] = []
    for kind, m in matches:
        norm = _describe(gm, m, is_folded=kind == _PATTERNS[0][0])
        if norm.is_folded:
            _give_bias(norm)
            editor.replace(m.anchor, argument(m.nodes["bn"], "input"))
            editor.discard(m.covered)
            found.append(norm)
        else:
            editor.replace(m.anchor, _made_alone(gm, norm, m, len(alone)))
            editor.discard(m.covered)
            alone.append(norm)
    editor.finish()
    return found


def _accepts(kind: str, m: Match) -> bool:
    """True if a batch norm has statistics to train, and may be folded if it is to be."""
    norm = m.nodes["bn"]
    given = arguments(norm)
    state = [given[name] for name in _STATE]
    has_state = all(v is None or (isinstance(v, Node) and v.op == "get_attr") for v in state)
    if not has_state or state[2] is None or state[3] is None:
        return False
    if m.anchor is not norm and other_results_used(m):
        return False
    if kind != _PATTERNS[0][0]:
        return True
    producer = m.nodes["producer"]
    is_constant = m.is_constant("w") and m.is_constant("b")
    return is_constant and len(producer.users) == 1 and channel_follows(producer, norm)


def _describe(gm: GraphModule, m: Match, *, is_folded: bool) -> DetachedNorm:
    norm = m.nodes["bn"]
    given = arguments(norm)
    state = {name: given[name] for name in _STATE}
    mean = state["running_mean"]
    owner = str(mean.target).rpartition(".")[0]
    counter = f"{owner}.num_batches_tracked" if owner else "num_batches_tracked"
    if isinstance(attribute(gm, counter), Tensor):
        state["num_batches_tracked"] = _read_behind(gm.graph, mean, counter)
    else:
        state["num_batches_tracked"] = None
    return DetachedNorm(
        producer=m.nodes["producer"] if is_folded else given["input"],
        trace=dict(norm.meta),
        state=state,
        momentum=float(given.get("momentum", 0.1)),
        eps=float(given["eps"] if "eps" in given else given["epsilon"]),
        is_folded=is_folded,
        has_bias=is_folded and argument(m.nodes["producer"], "bias") is not None,
    )


def _read_behind(graph: Graph, node: Node, target: str) -> Node:
    with graph.inserting_after(node):
        return graph.get_attr(target)


def _give_bias(norm: DetachedNorm) -> None:
    """Give a conv or linear without bias the argument that its folded bias will be."""
    if norm.has_bias:
        return
    stand_in = norm.state["bias"] or norm.state["running_mean"]
    assert stand_in is not None  # _accepts asks for running_mean
    if not stand_in < norm.producer:
        norm.producer.prepend(stand_in)
    set_arguments(norm.producer, bias=stand_in)


def set_arguments(call: Node, **changes: Node) -> None:
    """Change some arguments of a call by their schema names."""
    values = arguments(call) | changes
    count = max([len(call.args), *(list(values).index(name) + 1 for name in changes)])
    leading = list(values)[:count]
    call.args = tuple(values[name] for name in leading)
    call.kwargs = {k: v for k, v in call.kwargs.items() if k not in leading}


def drop_counters(gm: GraphModule) -> None:
    """Remove the counting of batches from the graph: TrainedBatchNorm counts."""
    for node in list(gm.graph.nodes):
        if is_call(node, (aten.add_.Tensor,)) and not node.users:
            counter = node.args[0]
            if isinstance(counter, Node) and str(counter.target).endswith("num_batches_tracked"):
                gm.graph.erase_node(node)


def _made_alone(gm: GraphModule, norm: DetachedNorm, m: Match, number: int) -> Node:
    """The module call that takes the place of a batch norm that is not folded."""
    target = add_module(gm, f"batch_norm_{number}", TrainedBatchNorm(norm.momentum, norm.eps))
    args = (norm.producer, None, None, *norm.state.values())
    with gm.graph.inserting_before(m.anchor):
        return call_module(gm.graph, target, args, m.anchor, m.anchor.meta["val"])


def add_module(gm: GraphModule, name: str, module: nn.Module) -> str:
    """Register a module under a name, or under that with a number if it is taken."""
    taken, number = name, 0
    while hasattr(gm, taken):
        number += 1
        taken = f"{name}_{number}"
    gm.add_submodule(taken, module)
    return taken


def call_module(graph: Graph, target: str, args: tuple[Any, ...], like: Node, val: Any) -> Node:
    """Insert a call of a module at the graph's insert point."""
    node = graph.call_module(target, args)
    node.meta["val"] = val
    copy_trace(node, like)
    return node


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
