"""Targets for a tensor's factors per channel: a norm, a constant, weight rows, a multiplication."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from pt2e_quant.core.errors import module_path
from pt2e_quant.core.recurrent_ops import RecurrentLayer
from pt2e_quant.graph.idioms.rms_norm import FEATURE_NORMS
from pt2e_quant.graph.meta import ORIGIN_KEY, origin_name
from pt2e_quant.graph.ops import (
    CONV,
    LAYER_NORM,
    LINEAR,
    MUL,
    RELU,
    argument,
    aten,
    is_call,
    layer_operands,
    operand_names,
)
from pt2e_quant.passes.algorithms.algorithm import move_spec, record_float
from pt2e_quant.passes.algorithms.algorithm_graph import AlgorithmGraph, Constant, unobserved
from pt2e_quant.passes.algorithms.grid import Declined

OUTPUT_FACTORS_KEY = "pt2e_quant.output_factors"
"""Key of a node's `meta`: its value is the float program's divided by these, channel by channel."""

AXES_BEHIND_KEY = "pt2e_quant.axes_behind_channels"
"""The key of `node.meta` that says how many axes follow that of the channels; none if absent."""

INPUT_FACTORS_KEY = "pt2e_quant.input_factors"
"""Key of a linear's `meta`: the columns of its weight are multiplied by these."""


@dataclass(frozen=True, slots=True)
class Factors:
    """Constant factors and offsets of the operator that makes the tensor: they are divided."""

    constants: tuple[Constant, ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """A linear or convolution whose output channels are divided.

    A relu behind it takes no negative factor.
    """

    weight: Constant
    bias: Constant | None
    keeps_sign: bool = False

    def divide(self, factors: Tensor) -> None:
        """Divide each output channel by its factor."""
        value = self.weight.value
        self.weight.set(value.double() / factors.reshape(-1, *[1] * (value.dim() - 1)))
        if self.bias is not None:
            self.bias.set(self.bias.value.double() / factors)


def linear_behind(source: Node) -> Node | None:
    """The linear that computes a value, also through a relu: relu(y / s) * s is relu(y)."""
    if is_call(source, RELU) and len(source.users) == 1:
        source = source.all_input_nodes[0]
    return source if is_call(source, LINEAR) else None


def rows_of(graph: AlgorithmGraph, linear: Node, *, keeps_sign: bool = False) -> Rows:
    """The rows of a linear or convolution, to be divided.

    Raises:
        Declined: its weight or its bias cannot be changed.
    """
    bias = graph.optional_constant(linear, "bias")
    return Rows(graph.constant(linear, "weight"), bias, keeps_sign)


def columns_of(values: Tensor, reader: Node) -> Tensor:
    """A number for each input channel as a tensor that goes with the weight of their reader.

    Args:
        values: [C].
        reader: a linear, convolution or recurrent layer.
    """
    if is_call(reader, (*LINEAR, RecurrentLayer)):
        return values
    weight = argument(reader, "weight").meta["val"]
    groups = int(argument(reader, "groups"))
    spread = values.reshape(groups, -1).repeat_interleave(weight.shape[0] // groups, 0)
    return spread.reshape(*spread.shape, *[1] * (weight.dim() - 2))


def fold_target(
    graph: AlgorithmGraph, source: Node, readers: Sequence[Node]
) -> Factors | Rows | str:
    """The place for a tensor's factors that needs no new node, or why there is none.

    Args:
        graph: what it is in.
        source: the tensor.
        readers: the nodes that read it divided: linears or their observers.
    """
    is_alone = set(source.users) == set(readers)
    constants = _vectors(graph, source)
    if constants:
        return Factors(constants) if is_alone else f"{source.name} is read by others too"
    linear = _linear_of(source)
    if linear is None or linear.meta["val"].shape[-1] != source.meta["val"].shape[-1]:
        return f"{source.name} is made by no norm, linear or product with a linear"
    if not is_alone or len(linear.users) > 1:
        return f"{linear.name} is read by others too"
    try:
        return rows_of(graph, linear, keeps_sign=is_call(source, RELU))
    except Declined as reason:
        return str(reason)


def _linear_of(source: Node) -> Node | None:
    """The linear whose rows take factors: itself, before a relu, or as a factor of a product."""
    if is_call(source, MUL):
        first, second = (argument(source, name) for name in ("other", "self"))
        for node in (first, second):
            if isinstance(node, Node) and is_call(node, LINEAR) and first is not second:
                return node
    if is_call(source, RELU):
        source = source.all_input_nodes[0]
    return source if is_call(source, LINEAR) else None


def _vectors(graph: AlgorithmGraph, source: Node) -> tuple[Constant, ...]:
    """The constants of a norm or product with one number a channel; empty if one is no such."""
    if is_call(source, MUL):
        names = [n for n in ("self", "other") if _is_constant(argument(source, n))]
    elif is_call(source, FEATURE_NORMS) and len(argument(source, "normalized_shape")) == 1:
        is_centred = is_call(source, LAYER_NORM)
        names = ["weight", *(["bias"] if is_centred and argument(source, "bias") else [])]
    else:
        return ()
    width = source.meta["val"].shape[-1]
    try:
        found = tuple(graph.constant(source, name) for name in names)
    except Declined:
        return ()
    return found if all(c.value.numel() == width == c.value.shape[-1] for c in found) else ()


def _is_constant(operand: object) -> bool:
    return isinstance(operand, Node) and operand.op == "get_attr"


def note_factors(node: Node, key: str, factors: Tensor) -> None:
    """Note what the channels of a value or weight were scaled by, besides what was noted before."""
    before = node.meta.get(key, (1.0,) * factors.numel())
    node.meta[key] = tuple(a * b for a, b in zip(before, factors.tolist(), strict=True))


def _note_output(node: Node, factors: Tensor, layer: Node) -> None:
    """Note what the channels of a value on the way from a layer were divided by."""
    note_factors(node, OUTPUT_FACTORS_KEY, factors)
    if is_call(layer, CONV):
        node.meta[AXES_BEHIND_KEY] = node.meta["val"].dim() - 2  # [N, C, ...]


def noted_factors(node: Node, key: str) -> Tensor | None:
    """The noted factors, float64, broadcastable to the value; None if there are none."""
    factors = node.meta.get(key)
    if factors is None:
        return None
    behind = node.meta.get(AXES_BEHIND_KEY, 0) if key == OUTPUT_FACTORS_KEY else 0
    return torch.tensor(factors, dtype=torch.float64).reshape(-1, *[1] * behind)


def column_factors(reader: Node, weight: Node) -> Tensor | None:
    """What the columns of one of a layer's weights were multiplied by, or None.

    The tensor is float64 and broadcasts to the weight. A recurrent layer has other weights too.
    """
    if reader.target is RecurrentLayer and weight is not layer_operands(reader)[1]:
        return None
    found = noted_factors(reader, INPUT_FACTORS_KEY)
    return None if found is None else columns_of(found, reader)


def divide_inputs(
    graph: AlgorithmGraph,
    target: Factors | Rows | str,
    factors: Tensor,
    *,
    source: Node,
    linears: Sequence[Node],
    by: str,
    on_the_way: Sequence[Node] = (),
) -> None:
    """Divide the channels of a tensor that layers read, and multiply their weights.

    Args:
        graph: what they are in.
        target: what takes the factors; a multiplication of its own where `fold_target` gave a
            reason.
        factors: [C], not 0.
        source: the tensor.
        linears: its readers, also convolutions, or recurrent layers; their weights are constants
            to be changed.
        by: the algorithm, for the record of what stays float.
        on_the_way: the layer whose rows are the target, and all between it and the readers.
    """
    weights = [graph.constant(linear, operand_names(linear)[1]) for linear in linears]
    for weight, linear in zip(weights, linears, strict=True):
        weight.set(weight.value.double() * columns_of(factors, linear))
        note_factors(linear, INPUT_FACTORS_KEY, factors)
    if isinstance(target, Factors):
        note_factors(source, OUTPUT_FACTORS_KEY, factors)
        for constant in target.constants:
            constant.set(constant.value.double() / factors)
    elif isinstance(target, Rows):
        target.divide(factors)
        layer = _linear_of(source) or source
        for node in on_the_way or {source, layer}:
            _note_output(node, factors, on_the_way[0] if on_the_way else layer)
    else:
        operands = [layer_operands(linear)[0] for linear in linears]
        readers = [o if o is not source else r for o, r in zip(operands, linears, strict=True)]
        made = multiply(
            graph, source, 1 / factors, readers=readers, like=linears[0], name="input_scale", by=by
        )
        note_factors(made, OUTPUT_FACTORS_KEY, factors)
    graph.scale_statistics(linears, 1 / factors)


def multiply(
    graph: AlgorithmGraph,
    source: Node,
    factors: Tensor,
    *,
    readers: Sequence[Node],
    like: Node,
    name: str,
    by: str,
) -> Node:
    """Multiply what some readers of a tensor are given by factors, at run time and in float.

    Args:
        graph: what they are in.
        source: the tensor.
        factors: [C].
        readers: the nodes that are to read the product.
        like: whose module the multiplication belongs to.
        name: of the constant.
        by: the algorithm.
    """
    editor, owner, value = graph.editor, module_path(like), source.meta["val"]
    held = factors.to(value.dtype)
    factor = editor.constant(f"{owner}.{name}" if owner else name, held, like=like)
    made = editor.call(aten.mul.Tensor, source, factor, like=like, after=source, val=value)
    # It is the same value of the float program, in other units.
    made.meta[ORIGIN_KEY] = origin_name(unobserved(source))
    for reader in dict.fromkeys(readers):
        reader.replace_input_with(source, made)
        move_spec(reader, source, made)
    reason = f"{by} put it there, to give outlier channels their own steps"
    record_float(graph, made, reason, held)
    return made
