"""Find attention masks by dataflow, and constant ones by their values.

A mask reaches softmax (or an attention operator) only by being added to scores, or by choosing
among them. Its extreme entries (`finfo.min`, -inf) mark positions and are no data: a range that
holds them leaves one quantization step for everything else. A constant without such entries is a
bias of positions (Swin, T5, ALiBi), and data.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.graph.constant_values import ConstantValues
from pt2e_quant.graph.ops import (
    ADD,
    ADDMM,
    BMM,
    CASTS,
    CONV,
    CONV_TRANSPOSE,
    DIV,
    DROPOUT,
    LINEAR,
    LOG_SOFTMAX,
    MASKED_FILL,
    MATMUL,
    MM,
    MUL,
    SDPA,
    SOFTMAX,
    SUB,
    VIEWS,
    WHERE,
    Overloads,
    argument,
    aten,
    is_call,
)

_PRODUCTS: Overloads = (
    *MATMUL,
    *BMM,
    *MM,
    *ADDMM,
    aten.baddbmm.default,
    aten.einsum.default,
)
_CONTRACTIONS: Overloads = (*_PRODUCTS, *LINEAR, *CONV, *CONV_TRANSPOSE, *SDPA)
_SUM_OF_PRODUCT: Overloads = (aten.baddbmm.default,)
_TRANSPARENT: Overloads = (*VIEWS, *CASTS, *DROPOUT)
_SOFTMAX: Overloads = (*SOFTMAX, *LOG_SOFTMAX, aten._safe_softmax.default)
_SUM: Overloads = (*ADD, *SUB)
_SCALING: Overloads = (*MUL, *DIV, aten.mul.Scalar, aten.div.Scalar)
_CARRIERS: Overloads = (*_TRANSPARENT, *_SUM, *_SCALING, *MASKED_FILL, *WHERE)
_FIRST_OPERAND: Overloads = (*_TRANSPARENT, *MASKED_FILL)
_TWO_OPERANDS: Overloads = (*_SUM, *_SCALING)


HIDES = -32.0
"""The greatest number that hides a score it is added to: exp(-32) is 1e-14."""


def hidden_entries(values: Tensor) -> Tensor:
    """True for the entries of a constant addend that hide scores, and are no data.

    They are at most `HIDES`, and at least twice as far from 0 as every other entry: learned biases
    and ALiBi's distances may be as low, but have no such gap.

    >>> hidden_entries(torch.tensor([0.5, -100.0, -3.0, -torch.inf]))
    tensor([False,  True, False,  True])
    >>> hidden_entries(torch.tensor([0.0, -16.0, -30.0, -45.0]))
    tensor([False, False, False, False])
    """
    hidden = values.isneginf()
    if not values.is_floating_point() or not bool((values <= HIDES).any()):
        return hidden
    levels = values[~hidden].sort().values
    above = torch.cat([levels[1:], levels.new_zeros(1)])
    ends = levels[(levels <= HIDES) & (above >= levels / 2)]
    return hidden if ends.numel() == 0 else values <= ends[-1]


@dataclass(frozen=True, slots=True)
class MaskInfo:
    """The values of a graph that are masks or hold masked entries.

    Attributes:
        masks: values that matter only as masks, from where they are made to where they are
            added, selected by or multiplied as a gate behind softmax.
        masked_scores: scores from the first mask on to softmax.
    """

    masks: frozenset[Node]
    masked_scores: frozenset[Node]


class _Flow:
    """Facts about each value, from one walk forward."""

    def __init__(self, gm: GraphModule) -> None:
        self.known = ConstantValues(gm)
        self.constants = constants = self.known.nodes
        self.computed: set[Node] = set()
        self.scores: set[Node] = set()
        for node in gm.graph.nodes:
            if node.op != "call_function":
                continue
            inputs = node.all_input_nodes
            if is_call(node, _CONTRACTIONS) or any(n in self.computed for n in inputs):
                self.computed.add(node)
            if is_call(node, _PRODUCTS):
                if sum(n not in constants for n in inputs) > 1:
                    self.scores.add(node)
            elif is_call(node, _CARRIERS):
                if any(n in self.scores for n in inputs):
                    self.scores.add(node)

    def is_mask_beside(self, value: object, other: object) -> bool:
        """True if one operand of a sum or a choice is a mask and the other the scores.

        Scores come from a product; a mask does not. A constant counts as a mask only if it hides
        some scores, beside a product of two activations or with an infinity: it may be a bias.
        """
        if not isinstance(value, Node) or not isinstance(other, Node):
            return False
        if value in self.constants:
            held = self.known.value(value)
            if other in self.scores and bool(hidden_entries(held).any()):
                return True
            return bool(held.isneginf().any())
        return value not in self.computed and other in self.computed


class _Search:
    def __init__(self, gm: GraphModule) -> None:
        self.flow = _Flow(gm)
        self.seeds: dict[Node, None] = {}
        self.holds_mask: dict[Node, bool] = {}

    def scores(self, start: Node) -> bool:
        """Look for masks behind a softmax; whether the value holds masked entries."""
        stack: list[Node] = [start]
        order: list[Node] = []
        while stack:
            node = stack.pop()
            if node in self.holds_mask:
                continue
            self.holds_mask[node] = self._takes_mask(node)
            order.append(node)
            stack.extend(self._behind(node))
        for node in reversed(order):
            if any(self.holds_mask.get(n, False) for n in self._behind(node)):
                self.holds_mask[node] = True
        return self.holds_mask[start]

    def _takes_mask(self, node: Node) -> bool:
        """True if a mask is applied at a node; the mask is noted."""
        if is_call(node, _SUM):
            a, b = node.args[:2]
            found = [v for v, w in ((a, b), (b, a)) if self.flow.is_mask_beside(v, w)]
        elif is_call(node, _SUM_OF_PRODUCT):
            found = [v for v in node.args[:1] if self.flow.is_mask_beside(v, node)]
        elif is_call(node, MASKED_FILL):
            found = [n for n in node.all_input_nodes if n is not node.args[0]]
        elif is_call(node, WHERE):
            condition, a, b = node.args[:3]
            found = [condition]
            found += [v for v, w in ((a, b), (b, a)) if self.flow.is_mask_beside(v, w)]
        else:
            return False
        self.seeds.update((n, None) for n in found if isinstance(n, Node))
        return bool(found)

    def _behind(self, node: Node) -> list[Node]:
        """The operands in which scores may come to a node."""
        if is_call(node, _FIRST_OPERAND):
            operands: Iterable[object] = node.args[:1]
        elif is_call(node, _TWO_OPERANDS):
            operands = node.args[:2]
        elif is_call(node, WHERE):
            operands = node.args[1:3]
        else:
            return []
        return [n for n in operands if isinstance(n, Node) and n in self.flow.computed]

    def gates(self, softmax: Node) -> None:
        """Note what attention's output is multiplied by to blank fully masked rows."""
        for product in _readers_through(softmax, _TRANSPARENT):
            if not is_call(product, _PRODUCTS):
                continue
            for user in product.users:
                if not is_call(user, MUL):
                    continue
                a, b = user.args[:2]
                gate = b if a is product else a
                if isinstance(gate, Node) and gate not in self.flow.constants:
                    if self.flow.is_mask_beside(gate, product):
                        self.seeds[gate] = None


def _readers_through(node: Node, overloads: Overloads) -> list[Node]:
    """The readers of a value, also those behind some overloads."""
    found: list[Node] = []
    stack = list(node.users)
    while stack:
        user = stack.pop()
        if is_call(user, overloads):
            stack.extend(user.users)
        else:
            found.append(user)
    return found


def _upstream(gm: GraphModule, seeds: Iterable[Node]) -> frozenset[Node]:
    """The seeds, what they are views of, and every value that nothing but masks reads."""
    masks = set(seeds)
    for node in reversed(gm.graph.nodes):
        if node in masks:
            if is_call(node, _TRANSPARENT) and isinstance(node.args[0], Node):
                masks.add(node.args[0])
        elif node.op != "output" and node.users and all(u in masks for u in node.users):
            masks.add(node)
    return frozenset(masks)


def find_masks(gm: GraphModule) -> MaskInfo:
    """Find the masks of a graph, and the scores that hold masked entries; a few walks."""
    search = _Search(gm)
    masked: set[Node] = set()
    for node in gm.graph.nodes:
        if is_call(node, SDPA):
            mask = argument(node, "attn_mask")
            if isinstance(mask, Node):
                search.seeds[mask] = None
        elif is_call(node, _SOFTMAX) and isinstance(node.args[0], Node):
            if search.scores(node.args[0]):
                search.gates(node)
    masked = {n for n, holds in search.holds_mask.items() if holds}
    return MaskInfo(_upstream(gm, search.seeds) - masked, frozenset(masked))
