"""The linears of a prepared graph, as passes that scale their channels see them."""

from dataclasses import dataclass

from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import attribute, constant_of
from pt2e_quant.graph.ops import LINEAR, RELU, argument, is_call
from pt2e_quant.graph.pipeline import Note
from pt2e_quant.observers.base import UniformQuantizationObserverBase
from pt2e_quant.observers.static.channel_statistics import ChannelStatisticsObserver
from pt2e_quant.observers.static.minmax import MinMaxObserver, PerChannelMinMaxObserver

__all__ = [
    "LinearBias",
    "LinearWeight",
    "bias_of",
    "divide_rows",
    "linear_behind",
    "observed_with_statistics",
    "weight_of",
]


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """The weight of one linear in a prepared graph.

    Args:
        linear: the call.
        constant: the `get_attr` node that holds it.
        observer_node: the node that observes it.
        observer: its observer.
        value: float[out, in].
    """

    linear: Node
    constant: Node
    observer_node: Node
    observer: UniformQuantizationObserverBase
    value: Tensor

    def rebind(self, editor: Editor, value: Tensor) -> None:
        """Give the linear a new weight, and let its observer see that one instead."""
        value = value.to(self.value.dtype)
        new = editor.rebind(self.constant, value, reader=self.observer_node)
        self.observer_node.replace_input_with(self.constant, new)
        self.observer.reset_min_max_vals()
        self.observer(value)


def weight_of(gm: GraphModule, linear: Node) -> LinearWeight | str:
    """The weight of a linear, or the reason why it cannot be changed."""
    node = argument(linear, "weight")
    if node.op != "call_module":
        return f"the weight of {linear.name} is not observed"
    observer = attribute(gm, str(node.target))
    constant = node.args[0]
    if not isinstance(observer, (MinMaxObserver, PerChannelMinMaxObserver)):
        return f"{type(observer).__name__} of the weight of {linear.name} cannot start again"
    if constant.op != "get_attr" or set(constant.users) != {node} or set(node.users) != {linear}:
        return f"the weight of {linear.name} has other readers"
    value = constant_of(gm, constant)
    if value is None:
        return f"the weight of {linear.name} is no constant"
    return LinearWeight(linear, constant, node, observer, value)


def observed_with_statistics(
    gm: GraphModule,
) -> tuple[list[tuple[Node, ChannelStatisticsObserver]], list[Note]]:
    """The nodes that alone belong to a ChannelStatisticsObserver; a note where there are more."""
    nodes: dict[ChannelStatisticsObserver, list[Node]] = {}
    for node in gm.graph.nodes:
        if node.op == "call_module":
            observer = attribute(gm, str(node.target))
            if isinstance(observer, ChannelStatisticsObserver):
                nodes.setdefault(observer, []).append(node)
    shared = [
        Note(n.name, f"its range is shared by {len(places)} tensors", skipped=True)
        for places in nodes.values()
        if len(places) > 1
        for n in places[:1]
    ]
    return [(places[0], o) for o, places in nodes.items() if len(places) == 1], shared


def linear_behind(source: Node) -> Node | None:
    """The linear that computes a value, also through a relu: relu(y / s) * s is relu(y)."""
    if is_call(source, RELU) and len(source.users) == 1:
        source = source.all_input_nodes[0]
    return source if is_call(source, LINEAR) else None


@dataclass(frozen=True, slots=True)
class LinearBias:
    """A linear's bias and its one reader: the linear, or an observer that sees no data."""

    constant: Node
    reader: Node


def bias_of(gm: GraphModule, linear: Node) -> LinearBias | str | None:
    """The bias of a linear if it has one, or the reason why it cannot be changed."""
    node = argument(linear, "bias")
    if node is None:
        return None
    constant, reader = node, linear
    if node.op == "call_module":
        if isinstance(attribute(gm, str(node.target)), UniformQuantizationObserverBase):
            return f"the bias of {linear.name} has a range of its own"
        constant, reader = node.args[0], node
    if constant.op != "get_attr" or len(node.users) > 1:
        return f"the bias of {linear.name} is no constant of its own"
    return LinearBias(constant, reader)


def divide_rows(
    editor: Editor, weight: LinearWeight, bias: LinearBias | None, factors: Tensor
) -> None:
    """Divide each output channel of a linear by its factor."""
    weight.rebind(editor, weight.value / factors[:, None])
    if bias is None:
        return
    value = constant_of(editor.gm, bias.constant)
    assert value is not None  # a get_attr holds a tensor
    divided = (value / factors).to(value.dtype)
    new = editor.rebind(bias.constant, divided, reader=bias.reader)
    bias.reader.replace_input_with(bias.constant, new)
