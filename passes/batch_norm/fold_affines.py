"""Fold per-channel arithmetic behind a conv or linear into its weight and bias."""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

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

    Before:  y = add(mul(conv2d(x, w, b), scale[C, 1, 1]), shift[C, 1, 1])
    After:   y = conv2d(x, w * scale, b * scale + shift)
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
    return PassResult(changed=editor.finish(), notes=tuple(notes))


@dataclass(frozen=True, slots=True)
class _Step:
    """A call that computes x * scale + shift."""

    node: Node
    x: Node
    scale: Tensor
    shift: Tensor


@dataclass(frozen=True, slots=True)
class _Chain:
    """Steps that read each other alone, and what they compute together, float64[C]."""

    steps: tuple[_Step, ...]
    scale: Tensor
    shift: Tensor


def _chain_behind(gm: GraphModule, producer: Node, constants: Collection[Node]) -> _Chain:
    """The steps behind a conv or linear, also behind moves of its result."""
    node, dim = producer, channel_dim(producer)
    steps: list[_Step] = []
    channels = producer.meta["val"].shape[dim]
    is_known = isinstance(channels, int)  # a weight that is computed may have a dynamic size
    scale = torch.ones(channels if is_known else 0, dtype=torch.float64)
    shift = torch.zeros_like(scale)
    while is_known and len(node.users) == 1:
        reader = next(iter(node.users))
        if is_call(reader, MOVES):
            found = [d for d in range(reader.meta["val"].dim()) if moved_back(reader, d) == dim]
            if len(found) != 1:
                break
            dim = found[0]
        else:
            step = _step(gm, reader, dim, constants)
            if step is None:
                break
            steps.append(step)
            scale, shift = scale * step.scale, shift * step.scale + step.shift
        node = reader
    return _Chain(tuple(steps), scale, shift)


def _step(gm: GraphModule, node: Node, dim: int, constants: Collection[Node]) -> _Step | None:
    """A call as a step, None if it computes something else."""
    if not is_call(node, MUL + DIV + ADD + SUB):
        return None
    found = channel_operands(gm, node, dim, constants)
    if found is None:
        return None
    values = found.values.double()
    one, zero = torch.ones_like(values), torch.zeros_like(values)
    is_first = argument(node, "self") is found.x
    if is_call(node, MUL):
        return _Step(node, found.x, values, zero)
    if is_call(node, DIV):
        return _Step(node, found.x, 1 / values, zero) if is_first else None
    # self + alpha * other
    other = float(arguments(node)["alpha"]) * (-1 if is_call(node, SUB) else 1)
    if is_first:
        return _Step(node, found.x, one, values * other)
    return _Step(node, found.x, one * other, values)
