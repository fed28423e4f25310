"""Take batch norms out of a graph while it is annotated; `attach_batch_norm` puts them back.

A quantizer sees the graph that will be deployed: a conv or linear with the batch norm folded into
it. So one that knows nothing of batch norms annotates a graph for training as one for inference.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import attribute, copy_trace
from pt2e_quant.graph.ops import BATCH_NORM, argument, arguments, aten, is_call
from pt2e_quant.graph.pattern import Match, Op, find_matches
from pt2e_quant.passes.batch_norm.norm_producer import PRODUCER, channel_follows, other_results_used
from pt2e_quant.passes.batch_norm.trained_batch_norm import TrainedBatchNorm

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
    """Whether a batch norm has statistics to train, and may be folded if it is to be."""
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
