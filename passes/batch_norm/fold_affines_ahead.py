"""Fold a factor and a term for all channels into the layers that read the tensor."""

import math
from collections.abc import Collection
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_nodes
from pt2e_quant.graph.ops import ADD, CONV, DIV, LINEAR, MUL, SUB, argument, is_call
from pt2e_quant.graph.pipeline import HAS_VALUES, GraphPass, Note, PassResult, graph_pass
from pt2e_quant.passes.batch_norm.fold_affines import Step, affine_step, fold_affines
from pt2e_quant.passes.batch_norm.fold_batch_norm import (
    constants_of,
    set_constants,
    why_constants_stay,
)


@graph_pass(needs=(HAS_VALUES,), gives=())
def fold_affines_ahead(gm: GraphModule) -> PassResult:
    """Fold x * scale + shift, one number each, into the convs and linears that alone read it.

    PP-LCNetV3 has such an affine behind each activation. A padded convolution reads zeros beside
    it, which a term in the bias would move too: in front of one, factors alone are folded.

    Before:  y = conv2d(add(mul(x, scale[1]), shift[1]), w, b)
    After:   y = conv2d(x, w * scale, b + shift * sum(w))
    """
    editor, notes = Editor(gm), []
    constants = constant_nodes(gm.graph)
    taken: set[Node] = set()
    for node in reversed(list(gm.graph.nodes)):  # the last step of a chain first
        chain = None if node in taken else _chain_before(gm, node, constants)
        if chain is None:
            continue
        taken.update(chain.nodes)
        readers = list(node.users)
        reasons = [why_constants_stay(reader, constants.__contains__) for reader in readers]
        reason = next(filter(None, reasons), None)
        if reason is not None:
            notes.append(Note(node.name, reason, skipped=True))
            continue
        for reader in readers:
            weight, bias = constants_of(editor, reader)
            wide = weight.double()
            moved = chain.shift * wide.flatten(1).sum(1)
            bias = moved if bias is None else bias.double() + moved
            set_constants(editor, reader, (wide * chain.scale).to(weight.dtype), bias)
        for step in chain.nodes:
            notes.append(Note(step.name, f"folded into {', '.join(r.name for r in readers)}"))
        editor.replace(node, chain.x)
    return PassResult(changed=editor.finish(), notes=tuple(notes))


@dataclass(frozen=True, slots=True)
class _Chain:
    """Steps that read each other alone: x * scale + shift.

    Args:
        x: what the first of them reads.
        nodes: the steps, from the last to the first.
    """

    x: Node
    nodes: tuple[Node, ...]
    scale: float
    shift: float


def _chain_before(gm: GraphModule, last: Node, constants: Collection[Node]) -> _Chain | None:
    """The longest chain up to a call that layers alone read; None where there is none to fold."""
    if not last.users or not all(_reads_it(reader, last) for reader in last.users):
        return None
    is_padded = any(map(_is_padded, last.users))
    node, scale, shift, nodes = last, 1.0, 0.0, []
    while node is last or len(node.users) == 1:
        step = _scalar_step(gm, node, constants)
        if step is None or (is_padded and float(step.shift) != 0.0):
            break
        nodes.append(node)
        scale, shift = scale * float(step.scale), shift + scale * float(step.shift)
        node = step.x
    return _Chain(node, tuple(nodes), scale, shift) if nodes else None


def _scalar_step(gm: GraphModule, node: Node, constants: Collection[Node]) -> Step | None:
    if not is_call(node, (*MUL, *DIV, *ADD, *SUB)):
        return None
    step = affine_step(gm, node, 0, constants)
    if step is None or step.scale.numel() != 1:
        return None
    is_finite = math.isfinite(float(step.scale)) and math.isfinite(float(step.shift))
    return step if is_finite and float(step.scale) != 0.0 else None


def _reads_it(reader: Node, value: Node) -> bool:
    """True of a layer that reads a value as its input alone."""
    if not is_call(reader, CONV + LINEAR) or argument(reader, "input") is not value:
        return False
    return reader.all_input_nodes.count(value) == 1


def _is_padded(layer: Node) -> bool:
    if is_call(layer, LINEAR):
        return False
    padding = argument(layer, "padding")
    if isinstance(padding, str):
        return padding != "valid"
    return any(p != 0 for p in ([padding] if isinstance(padding, int) else padding))


FOLD_AFFINES: tuple[GraphPass, ...] = (fold_affines_ahead, fold_affines)
"""Ahead first: a clamp in between keeps its bounds then, and a relu is one for algorithms."""
