"""Sums of products of a value and a constant over some of their axes, as linears."""

import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.ops import ADDMM, BMM, MATMUL, MM, argument, arguments, aten, is_call
from pt2e_quant.graph.rewrite import Skip

ROWS = "_rows"
"""What the name of a weight ends in that is written as a linear's, transposed."""

LEAST_MATRIX = 128 * 128
"""The elements from which on each matrix of a stack becomes a linear: smaller ones take longer as
linears of many rows than as one product (`benchmarks/contractions.py`)."""

_ADDING = (*ADDMM, aten.baddbmm.default)
_PRODUCTS = (*MATMUL, *MM, *BMM, *_ADDING, aten.mv.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contraction:
    """A value and a constant that are multiplied and summed, each axis named by a letter.

    Args:
        x: the value.
        weight: the constant.
        name: what it is called in the model.
        given: the axes of the value in the model.
        left: those without the ones of size 1 that the constant repeats.
        right: the axes of the constant.
        result: the axes of the result: those that are not summed.
        bias: a constant vector that is added along the last axis of the result.
        added: what else is added to the result.
    """

    x: Node
    weight: Tensor
    name: str
    given: str
    left: str
    right: str
    result: str
    bias: Node | None = None
    added: Node | None = None

    @property
    def sizes(self) -> dict[str, Any]:
        """The size of each axis of the value."""
        return dict(zip(self.given, self.x.meta["val"].shape, strict=True))

    @property
    def summed(self) -> list[str]:
        """The axes that both have and the result has not."""
        return [a for a in self.left if a in self.right and a not in self.result]

    @property
    def shared(self) -> list[str]:
        """The axes that both have and the result too: each place has a matrix of its own."""
        return [a for a in self.left if a in self.right and a in self.result]

    @property
    def kept(self) -> list[str]:
        """The axes that the value alone has."""
        return [a for a in self.left if a not in self.right]

    @property
    def new(self) -> list[str]:
        """The axes that the constant alone has."""
        return [a for a in self.right if a not in self.left]


def einsum_contraction(gm: GraphModule, node: Node) -> Contraction | Skip:
    """Read an einsum; the reason if it is none of a value and a constant, summed over both."""
    terms = einsum_terms(node)
    if isinstance(terms, Skip):
        return terms
    operands: Sequence[Node] = argument(node, "tensors")
    return _contraction(operands, [constant_of(gm, n) for n in operands], terms)


def product_contraction(gm: GraphModule, node: Node) -> Contraction | Skip | None:
    """Read a matrix product or a tensordot of a constant as an einsum; None if it is neither."""
    operands: Sequence[Node]
    if is_call(node, (aten.tensordot.default,)):
        operands = argument(node, "self"), argument(node, "other")
        terms = _tensordot_terms(node, [n.meta["val"].dim() for n in operands])
    elif is_call(node, _PRODUCTS):
        given = list(arguments(node).values())
        operands = given[1:3] if is_call(node, _ADDING) else given[:2]
        terms = _matmul_terms([n.meta["val"].dim() for n in operands])
    else:
        return None
    held = [constant_of(gm, operand) for operand in operands]
    if all(value is None for value in held):
        return None
    found = _contraction(operands, held, terms)
    if isinstance(found, Skip) or not is_call(node, _ADDING):
        return found
    if (argument(node, "beta"), argument(node, "alpha")) != (1, 1):
        return Skip("its product or its sum is scaled")
    added = argument(node, "self")
    is_vector = [*added.meta["val"].shape] == [node.meta["val"].shape[-1]]
    is_bias = is_vector and not found.shared and found.new == [found.result[-1]]
    if is_bias and constant_of(gm, added) is not None:
        return replace(found, bias=added)
    return replace(found, added=added)


def _contraction(
    operands: Sequence[Node], held: Sequence[Tensor | None], terms: list[str]
) -> Contraction | Skip:
    """Read a product, whose constant operands hold these; the reason if it is no contraction."""
    if sum(value is None for value in held) != 1:
        return Skip("its operands are no value and a constant")
    at = 0 if held[0] is None else 1
    x, weight, source = operands[at], held[1 - at], operands[1 - at]
    assert weight is not None
    if x.meta["val"].dtype != weight.dtype or not weight.is_floating_point():
        return Skip("its operands have different dtypes, or are integers")
    found = Contraction(
        x=x,
        weight=weight,
        name=str(source.target) if source.op == "get_attr" else source.name,
        given=terms[at],
        left=terms[at],
        right=terms[1 - at],
        result=terms[2],
    )
    found = _each_axis_of_both_once(found)
    sizes = {axis: found.sizes[axis] for axis in found.left}
    if any(sizes.get(a, n) != n for a, n in zip(found.right, found.weight.shape, strict=True)):
        return Skip("an axis of size 1 is expanded")
    if not (found.summed and found.kept):
        return Skip("no axis is summed over both, or the value has no other")
    if sorted(found.kept + found.new + found.shared) != sorted(found.result):
        return Skip("an axis of one operand alone is summed")
    if len(found.shared) > 1:
        return Skip("more than one axis chooses a matrix")
    if (
        found.shared
        and found.weight.select(found.right.index(found.shared[0]), 0).numel() < LEAST_MATRIX
    ):
        return Skip("each of its matrices is small: as linears they would take longer")
    return found


def _each_axis_of_both_once(found: Contraction) -> Contraction:
    """A contraction without axes along which one operand is the same everywhere."""
    for axis in found.shared:
        at = found.right.index(axis)
        one = found.weight.narrow(at, 0, 1)
        if found.weight.shape[at] != 1 and found.sizes[axis] == 1:
            found = replace(found, left=found.left.replace(axis, ""))
        elif torch.equal(found.weight, one.expand_as(found.weight)):
            right = found.right.replace(axis, "")
            found = replace(found, weight=one.squeeze(at), right=right)
    return found


def _matmul_terms(ranks: Sequence[int]) -> list[str]:
    """The axes of a matmul's operands, and of its result, as torch broadcasts them.

    >>> _matmul_terms([4, 3]), _matmul_terms([2, 1])
    (['abMK', 'bKN', 'abMN'], ['MK', 'K', 'M'])
    """
    batch = string.ascii_lowercase[: max(*ranks, 2) - 2]
    left, right = (
        batch[len(batch) - max(rank - 2, 0) :] + own
        for rank, own in zip(ranks, ("MK"[-ranks[0] :], "KN"[: ranks[1]]), strict=True)
    )
    return [left, right, batch + "M" * ("M" in left) + "N" * ("N" in right)]


def _tensordot_terms(node: Node, ranks: Sequence[int]) -> list[str]:
    """The axes of a tensordot's operands, and of its result."""
    left = list(string.ascii_lowercase[: ranks[0]])
    right = list(string.ascii_uppercase[: ranks[1]])
    for here, there in zip(argument(node, "dims_self"), argument(node, "dims_other"), strict=True):
        right[there] = left[here]
    result = [a for a in left if a not in right] + [a for a in right if a not in left]
    return ["".join(term) for term in (left, right, result)]


def einsum_terms(node: Node) -> list[str] | Skip:
    """The axes of both operands of an einsum and of its result; the reason if it has no such."""
    operands: Sequence[Node] = argument(node, "tensors")
    if len(operands) != 2:
        return Skip("it has another number of operands than two")
    terms = axes_of_terms(argument(node, "equation"), [n.meta["val"].dim() for n in operands])
    return terms or Skip("its equation repeats an axis of an operand, or names no result")


def axes_of_terms(equation: str, ranks: Sequence[int]) -> list[str] | None:
    """The axes of each operand and of the result, a letter each, those of an ellipsis too."""
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    terms = [*inputs.split(","), result]
    if not arrow or len(terms) != len(ranks) + 1:
        return None
    named = [len(term.replace("...", "")) for term in terms]
    spare = [letter for letter in string.ascii_letters if letter not in equation]
    hidden = [
        rank - count for rank, count, t in zip(ranks, named, terms, strict=False) if "..." in t
    ]
    if len(set(hidden)) > 1:
        return None
    stands = "".join(spare[: hidden[0]]) if hidden else ""
    terms = [term.replace("...", stands) for term in terms]
    return terms if all(len(set(term)) == len(term) for term in terms) else None


Weights = dict[tuple[object, ...], Node]
"""The weights made so far: products of one constant read one, which is in the file once."""


def linears_of(found: Contraction, editor: Editor, like: Node, weights: Weights) -> Node:
    """Write a contraction as a linear, or as one for each place of a shared axis.

    Before:  einsum("bthk,hkd->bthd", x, w)                      w: [H, K, D], constant
    After:   cat([linear(x[:, :, h : h + 1], w[h].T) for h], 2)
    """
    if (joined := _joined(found)) is not None:
        inner, sizes = joined
        made = linears_of(inner, editor, like, weights)
        return editor.call(aten.reshape.default, made, sizes, like=like)
    x = found.x
    dropped = [at for at, axis in enumerate(found.given) if axis not in found.left]
    if dropped:
        x = editor.call(aten.squeeze.dims, x, dropped, like=like)
    if found.shared:
        made = _linear_of_each(found, x, editor, like, weights)
    else:
        made = _linear(found, x, f"{found.name}{ROWS}", editor, like, weights)
    if found.added is not None:
        made = editor.call(aten.add.Tensor, made, found.added, like=like)
    return made


def _joined(found: Contraction) -> tuple[Contraction, list[Any]] | None:
    """A contraction of what a view joins the leading axes of, and the sizes of the result.

    None if the value is no such view, or its rows are not along its last axis alone.
    """
    if not is_call(found.x, (aten.view.default, aten.reshape.default)) or found.added is not None:
        return None
    source, sizes = found.x.args[0], found.x.args[1]
    if not isinstance(source, Node) or not isinstance(sizes, (list, tuple)):
        return None
    before, after = (n.meta["val"].shape for n in (source, found.x))
    if len(before) <= len(after) or before[-1] != after[-1]:
        return None
    in_order = "".join(found.kept + found.summed), "".join(found.kept + found.new)
    if (found.given, found.result) != in_order or len(found.summed) != 1:
        return None
    spare = [a for a in string.ascii_letters if a not in found.given + found.right]
    rows = "".join(spare[: len(before) - 1])
    given, result = rows + found.given[-1], rows + "".join(found.new)
    inner = replace(found, x=source, given=given, left=given, result=result)
    new = [found.weight.shape[found.right.index(axis)] for axis in found.new]
    return inner, [*sizes[:-1], *new]


def _linear_of_each(
    found: Contraction, x: Node, editor: Editor, like: Node, weights: Weights
) -> Node:
    """A linear for each place of the shared axis, and their results as one."""
    (axis,) = found.shared
    at, there = found.left.index(axis), found.right.index(axis)
    right, made = found.right.replace(axis, ""), []
    for place, matrix in enumerate(found.weight.unbind(there)):
        part = editor.call(aten.slice.Tensor, x, at, place, place + 1, like=like)
        one = replace(found, weight=matrix, right=right)
        made.append(_linear(one, part, f"{found.name}{ROWS}_{place}", editor, like, weights))
    return editor.call(aten.cat.default, made, found.result.index(axis), like=like)


def _linear(
    found: Contraction, x: Node, name: str, editor: Editor, like: Node, weights: Weights
) -> Node:
    """The linear between a permutation of its input's axes and one of its result's."""
    kept, summed, new = found.kept, found.summed, found.new
    order = [found.right.index(axis) for axis in new + summed]
    rows = found.weight.permute(order)
    sizes = list(rows.shape[: len(new)])
    if (key := (name, *order, *sizes)) not in weights:
        flat = rows.reshape(prod(sizes), -1).contiguous()
        weights[key] = editor.constant(name, flat, like=like)
    weight = weights[key]
    y = permuted(x, [found.left.index(axis) for axis in (*kept, *summed)], editor, like)
    if len(summed) > 1:
        y = editor.call(aten.flatten.using_ints, y, len(kept), -1, like=like)
    y = editor.call(aten.linear.default, y, weight, found.bias, like=like)
    if not new:
        y = editor.call(aten.squeeze.dim, y, -1, like=like)
    if len(new) > 1:
        y = editor.call(aten.unflatten.int, y, -1, sizes, like=like)
    made = [*kept, *new]
    return permuted(y, [made.index(axis) for axis in found.result], editor, like)


def permuted(x: Node, order: list[int], editor: Editor, like: Node) -> Node:
    """A tensor with its axes in another order; itself if they are in order."""
    if order == sorted(order):
        return x
    return editor.call(aten.permute.default, x, order, like=like)
