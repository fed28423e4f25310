"""Fold per-channel arithmetic behind a conv or linear into its weight and bias."""

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.graph.clamps import clamp_bounds
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_nodes, constant_of
from pt2e_quant.graph.ops import (
    ADD,
    CONV,
    CONV_TRANSPOSE,
    DIV,
    LINEAR,
    MUL,
    SUB,
    argument,
    arguments,
    aten,
    is_call,
)
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass
from pt2e_quant.passes.batch_norm.fold_batch_norm import fold_into, why_not_foldable
from pt2e_quant.passes.batch_norm.norm_producer import MOVES, channel_dim, moved_back


@dataclass(frozen=True, slots=True)
class ChannelOperands:
    """The operands of an operator: a computed tensor and a constant.

    Attributes:
        x: the computed tensor.
        constant: the node of the constant.
        values: the constant, one value for each channel of x or one for all of them.
    """

    x: Node
    constant: Node
    values: Tensor


def channel_operands(
    gm: GraphModule, node: Node, dim: int, constants: Collection[Node]
) -> ChannelOperands | None:
    """The operands of a call whose constant has a value per channel, None for other calls.

    Args:
        gm: the graph module.
        node: a call of an operator with the operands `self` and `other`.
        dim: the dimension of the computed operand that holds its channels.
        constants: those of the graph.
    """
    x, y = (argument(node, name) for name in ("self", "other"))
    if not isinstance(x, Node) or not isinstance(y, Node):
        return None
    if x in constants:
        x, y = y, x
    held = constant_of(gm, y) if y in constants and x not in constants else None
    value = x.meta["val"]
    # The computed operand of `tensor * x.shape[0]` is a size.
    if held is None or not isinstance(value, Tensor) or value.dtype != held.dtype:
        return None
    if held.dim() > value.dim() or value.dim() <= dim:
        return None
    lengths = [1] * (value.dim() - held.dim()) + list(held.shape)
    if held.numel() != lengths[dim] or held.numel() not in (1, value.shape[dim]):
        return None
    return ChannelOperands(x, y, held.reshape(-1))


@graph_pass(needs=(HAS_VALUES,), gives=())
def fold_affines(gm: GraphModule) -> PassResult:
    """Fold sums, differences, products and quotients per channel into the conv or linear before.

    A frozen batch norm is written as such, and so is a layer's scale (Touvron et al. 2021, Going
    deeper with image transformers, section 2). Factors and terms of a chain are put together in
    float64; numbers that the code writes (`y * 0.5`) are left, as other patterns ask for them.

    One factor and one term for all channels behind a clamp (the affine blocks of HGNetV2) go in
    front of it, and its bounds with them.

    Before:  y = add(mul(conv2d(x, w, b), scale[C, 1, 1]), shift[C, 1, 1])
    After:   y = conv2d(x, w * scale, b * scale + shift)
    Before:  y = add(mul(relu(conv2d(x, w, b)), scale[1]), shift[1])
    After:   y = clamp(conv2d(x, w * scale, b * scale + shift), min=shift)
    """
    editor, notes = Editor(gm), []
    constants = constant_nodes(gm.graph)
    for producer in [n for n in gm.graph.nodes if is_call(n, CONV + CONV_TRANSPOSE + LINEAR)]:
        chain = _chain_behind(gm, producer, constants)
        if not chain.steps:
            continue
        reason = why_not_foldable(producer, constants.__contains__)
        if reason is None and not bool(chain.scale.isfinite().all() & chain.shift.isfinite().all()):
            reason = "a factor or term is not finite"
        if reason is not None:
            notes.append(Note(chain.steps[0].node.name, reason, skipped=True))
            continue
        fold_into(editor, producer, chain.scale, chain.shift)
        for step in chain.steps:
            editor.replace(step.node, step.x)
            notes.append(Note(step.node.name, f"folded into {producer.name}"))
        for clamp in chain.clamps:
            low, high = (None if math.isinf(end) else end for end in clamp.moved_bounds())
            made = editor.call(
                aten.clamp.default,
                editor.now(clamp.node.all_input_nodes[0]),
                like=clamp.node,
                val=clamp.node.meta["val"],
                min=low,
                max=high,
            )
            editor.replace(clamp.node, made)
    return PassResult(changed=editor.finish(), notes=tuple(notes))


@dataclass(frozen=True, slots=True)
class Step:
    """A call that computes x * scale + shift, float64 of one value or [C]."""

    node: Node
    x: Node
    scale: Tensor
    shift: Tensor


@dataclass(slots=True)
class _Clamp:
    """A call that cuts values off, and the affine behind it that goes in front of it."""

    node: Node
    low: float
    high: float
    scale: float = 1.0
    shift: float = 0.0

    def takes(self, step: Step) -> bool:
        """True if a step can go in front of the clamp."""
        return step.scale.numel() == 1 and float(step.scale) != 0.0

    def take(self, step: Step) -> None:
        """Put a step in front."""
        scale, shift = float(step.scale), float(step.shift)
        self.scale, self.shift = self.scale * scale, self.shift * scale + shift

    def moved_bounds(self) -> tuple[float, float]:
        """Return the bounds behind the affine."""
        low, high = (end * self.scale + self.shift for end in (self.low, self.high))
        return min(low, high), max(low, high)


@dataclass(frozen=True, slots=True)
class _Chain:
    """Steps that read each other alone, and what they compute together, float64[C]."""

    steps: tuple[Step, ...]
    clamps: tuple[_Clamp, ...]
    scale: Tensor
    shift: Tensor


def _chain_behind(gm: GraphModule, producer: Node, constants: Collection[Node]) -> _Chain:
    """The steps behind a conv or linear, also behind moves of its result and clamps."""
    node, dim = producer, channel_dim(producer)
    steps: list[Step] = []
    clamps: list[_Clamp] = []
    channels = producer.meta["val"].shape[dim]
    is_known = isinstance(channels, int)  # a weight that is computed may have a dynamic size
    scale = torch.ones(channels if is_known else 0, dtype=torch.float64)
    shift = torch.zeros_like(scale)
    while is_known and len(node.users) == 1:
        reader = next(iter(node.users))
        bounds = clamp_bounds(reader)
        if bounds is not None and bounds[0] < bounds[1]:
            clamps.append(_Clamp(reader, *bounds))
        elif is_call(reader, MOVES):
            found = [d for d in range(reader.meta["val"].dim()) if moved_back(reader, d) == dim]
            if len(found) != 1:
                break
            dim = found[0]
        else:
            step = affine_step(gm, reader, dim, constants)
            if step is None or not all(clamp.takes(step) for clamp in clamps):
                break
            steps.append(step)
            scale, shift = scale * step.scale, shift * step.scale + step.shift
            for clamp in clamps:
                clamp.take(step)
        node = reader
    moved = [clamp for clamp in clamps if (clamp.scale, clamp.shift) != (1.0, 0.0)]
    return _Chain(tuple(steps), tuple(moved), scale, shift)


def affine_step(gm: GraphModule, node: Node, dim: int, constants: Collection[Node]) -> Step | None:
    """A call as a step, None if it computes something else.

    Args:
        gm: the graph module.
        node: the call.
        dim: the dimension of the computed operand that holds its channels.
        constants: those of the graph.
    """
    if not is_call(node, MUL + DIV + ADD + SUB):
        return None
    found = channel_operands(gm, node, dim, constants)
    if found is None:
        return None
    values = found.values.double()
    one, zero = torch.ones_like(values), torch.zeros_like(values)
    is_first = argument(node, "self") is found.x
    if is_call(node, MUL):
        return Step(node, found.x, values, zero)
    if is_call(node, DIV):
        return Step(node, found.x, 1 / values, zero) if is_first else None
    # self + alpha * other
    other = float(arguments(node)["alpha"]) * (-1 if is_call(node, SUB) else 1)
    if is_first:
        return Step(node, found.x, one, values * other)
    return Step(node, found.x, one * other, values)
