"""Products by matrices that each row chooses: the experts of a mixture of experts."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.graph.idioms.composite import define_composite
from pt2e_quant.graph.meta import constant_of, source_constant
from pt2e_quant.graph.ops import (
    ADDMM,
    BMM,
    CASTS,
    CONV,
    EMBEDDING,
    IDENTITIES,
    LINEAR,
    MATMUL,
    RESHAPE,
    SDPA,
    SQUEEZE,
    UNSQUEEZE,
    argument,
    arguments,
    aten,
    calls,
    is_call,
    is_getitem,
)
from pt2e_quant.graph.rewrite import Skip

GROUPED_PRODUCTS = ("transformers.grouped_mm_fallback.default", "aten._grouped_mm.default")
"""Operators (rows in the order of their groups, matrices, ends of the groups), by name: the first
exists only where `transformers` is imported."""

ROUTER_KEY = "pt2e_quant.router"
"""Key of `node.meta`: set for a linear that experts are chosen by."""

_CHOICES = (aten.argmax.default, aten.argmin.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertProduct:
    """`value[s] = weights[ids[s]] @ x[s]`.

    Args:
        value: float[S, N].
        x: float[S, K].
        weights: float[E, N, K], constant.
        source: the node of the constant that holds them.
        ids: int[S].
        are_ids_known: whether each is known to be from 0 to E - 1.
    """

    value: Node
    x: Node
    weights: Tensor
    source: Node
    ids: Node
    are_ids_known: bool


def expert_product(gm: GraphModule, node: Node) -> ExpertProduct | Skip | None:
    """The product that a node is; why it cannot be one; None for other operators.

    Two forms are known, those of `transformers`: rows sorted by expert with a grouped product, and
    matrices gathered for each row with a product of batches.
    """
    if str(node.target) in GROUPED_PRODUCTS:
        return _grouped(gm, node)
    if is_call(node, BMM + MATMUL):
        return _gathered(gm, node)
    return None


def _grouped(gm: GraphModule, node: Node) -> ExpertProduct | Skip:
    x, weight, ends, *others = arguments(node).values()
    held = constant_of(gm, weight)
    if held is None or held.dim() != 3 or x.meta["val"].dim() != 2:
        return Skip("its matrices are not constant, or its rows are no matrix")
    if any(other is not None for other in others):
        return Skip("it has a bias, or another dtype for its result")
    ids = _sorted_ids(ends, held.shape[0])
    if ids is None:
        return Skip("the ends of its groups are not counted of sorted numbers of experts")
    return _product(node, x, held.mT, weight, ids)


def _gathered(gm: GraphModule, node: Node) -> ExpertProduct | Skip | None:
    left, right = node.args[:2]
    for weight, rows, axis in ((left, right, -1), (right, left, 1)):
        taken = _taken(weight)
        if taken is None:
            continue
        source, ids = taken
        held = constant_of(gm, source)
        if held is None or held.dim() != 3 or ids.meta["val"].dim() != 1:
            continue
        values = list(node.users)
        if not calls(rows, UNSQUEEZE) or argument(rows, "dim") not in (axis, axis % 3):
            return Skip("it multiplies chosen matrices by more than a row each")
        if not all(is_call(n, SQUEEZE) and n.meta["val"].dim() == 2 for n in values):
            return Skip("its result keeps the axis of one row")
        if len(values) != 1:
            return Skip("several operators read its result")
        matrices = held if axis == -1 else held.mT
        x = argument(rows, "self")
        sizes = [[str(n) for n in v.meta["val"].shape[:1]] for v in (x, ids, values[0])]
        if x.meta["val"].dim() != 2 or sizes[0] != sizes[1] or sizes[1] != sizes[2]:
            return Skip("it has another number of rows than of chosen matrices")
        return _product(values[0], x, matrices, source, ids)
    return None


def _product(value: Node, x: Node, weights: Tensor, weight: Node, ids: Node) -> ExpertProduct:
    source = source_constant(weight)
    return ExpertProduct(
        value=value,
        x=x,
        weights=weights,
        source=weight if source is None else source,
        ids=ids,
        are_ids_known=scores_of(ids, weights.shape[0]) is not None,
    )


def _taken(node: Any) -> tuple[Node, Node] | None:
    """The table and the places of a call that takes entries of a table's first axis."""
    if calls(node, (aten.index.Tensor,)):
        places = argument(node, "indices")
        if len(places) == 1 and isinstance(places[0], Node):
            return argument(node, "self"), places[0]
    if calls(node, (aten.index_select.default,)) and argument(node, "dim") == 0:
        return argument(node, "self"), argument(node, "index")
    return None


def taken_rows(node: Node) -> tuple[Node, Node] | None:
    """The matrix and the places of its rows that a call gathers; None for other calls."""
    found = _taken(node)
    if found is None or found[0].meta["val"].dim() != 2 or found[1].meta["val"].dim() != 1:
        return None
    return None if found[1].meta["val"].dtype.is_floating_point else found


def _sorted_ids(ends: Any, count: int) -> Node | None:
    """The sorted numbers whose groups end at `cumsum(histc(ids, count, 0, count - 1))`."""
    if not calls(ends, (aten.cumsum.default,)):
        return None
    counts = _behind_casts(argument(ends, "self"))
    if not calls(counts, (aten.histc.default,)):
        return None
    found = arguments(counts)
    if (found["bins"], found["min"], found["max"]) != (count, 0, count - 1):
        return None
    ids = _behind_casts(found["self"])
    return ids if are_sorted(ids) else None


_SORTS = (aten.sort.default, aten.sort.stable)


def _sort_of(node: Node) -> Node | None:
    """The sort whose values a node is."""
    if not is_getitem(node) or node.args[1] != 0:
        return None
    sort = node.args[0]
    return sort if calls(sort, _SORTS) else None


def are_sorted(ids: Node) -> bool:
    """True if a node is the values of an ascending sort."""
    sort = _sort_of(ids)
    return sort is not None and not argument(sort, "descending")


def _behind_casts(node: Node) -> Node:
    while calls(node, CASTS):
        node = node.all_input_nodes[0]
    return node


def scores_of(ids: Node, count: int) -> Node | None:
    """The numbers, `count` for each token, whose extremes have the places `ids`, in any order.

    Those of a token differ. None if the integers are known to be nothing of the kind.
    """
    node = ids
    while True:
        if is_call(node, RESHAPE + IDENTITIES + CASTS + SQUEEZE + UNSQUEEZE):
            node = node.all_input_nodes[0]
        elif (sort := _sort_of(node)) is not None:
            node = sort.all_input_nodes[0]
        else:
            break
    if is_getitem(node) and node.args[1] == 1 and calls(node.args[0], (aten.topk.default, *_SORTS)):
        node = node.args[0]
    elif not is_call(node, _CHOICES):
        return None
    scores: Node = argument(node, "self")
    dim = argument(node, "dim")
    return scores if dim is not None and scores.meta["val"].shape[dim] == count else None


def routers_of(ids: Node, count: int) -> list[Node]:
    """The linears that give the scores, `count` for each token, by which experts are chosen."""
    found: list[Node] = []
    seen, stack = {ids}, [ids]
    while stack:
        for node in stack.pop().all_input_nodes:
            if node in seen or node.op != "call_function":
                continue
            seen.add(node)
            if not is_call(node, _PRODUCTS):
                stack.append(node)
            elif is_call(node, LINEAR) and node.meta["val"].shape[-1] == count:
                found.append(node)
    return found


_PRODUCTS = (*LINEAR, *ADDMM, *BMM, *MATMUL, aten.mm.default, *CONV, *EMBEDDING, *SDPA)


def is_one_row(value: Tensor) -> bool:
    """True for an operand that all rows of a matrix read alike."""
    return value.dim() < 2 or (value.dim() == 2 and value.shape[0] == 1)


def is_by_row(node: Node) -> bool:
    """True if each row of a matrix that a call gives depends on the same row of its operands.

    Operands that all rows read alike (`is_one_row`) are not asked about.
    """
    if node.op != "call_function":
        return False
    if is_getitem(node):
        return True
    if is_call(node, _OF_COLUMNS):
        return argument(node, "dim") in (1, -1)
    target: Any = node.target
    return isinstance(target, torch._ops.OpOverload) and (
        torch.Tag.pointwise in target.tags or is_call(node, CASTS[:1])
    )


_OF_COLUMNS = (
    aten.chunk.default,
    aten.slice.Tensor,
    aten.softmax.int,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.glu.default,
)


def _rows_of(x: Tensor, counts: Tensor, expert: int, most: int) -> Tensor:
    """The rows of one expert, then zeros: a runtime with sizes of run time leaves these out."""
    places = torch.arange(most)
    begin = counts[:expert].sum()
    is_in = (places < counts[expert]).unsqueeze(-1)
    rows = x.index_select(0, (places + begin).clamp(max=x.shape[0] - 1))
    return torch.where(is_in, rows, torch.zeros_like(rows))


def _joined(parts: list[Tensor], counts: Tensor, ids: Tensor) -> Tensor:
    """The rows of all experts one after another."""
    begins = counts.cumsum(0) - counts
    within = torch.arange(ids.shape[0]) - begins.index_select(0, ids)
    rows = torch.cat(parts).reshape(-1, parts[0].shape[1])
    return rows.index_select(0, ids * parts[0].shape[0] + within)


RowsOfExpert = define_composite(
    "rows_of_expert(Tensor x, Tensor counts, int expert, SymInt most) -> Tensor", _rows_of
)
"""x: float[S, K], sorted by expert; counts: int[E], the rows of each, `most` at most.

float[most, K]: the expert's rows and zeros behind them; at run time its rows alone will do."""

JoinedRows = define_composite(
    "joined_rows(Tensor[] parts, Tensor counts, Tensor ids) -> Tensor", _joined
)
"""What experts make of their rows, float[S, N], one after another; ids: int[S], sorted."""
