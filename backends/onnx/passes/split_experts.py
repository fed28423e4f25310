"""Let each expert of a mixture of experts compute the rows that chose it, and no others."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from pt2e_quant.core.qdq import CHOOSE_QPARAMS_OPS, ChoosePerToken, is_dequantize, is_quantize
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.idioms.experts import (
    JoinedRows,
    RowsOfExpert,
    are_sorted,
    is_by_row,
    is_one_row,
    scores_of,
)
from pt2e_quant.graph.meta import constant_nodes
from pt2e_quant.graph.ops import CAT, LINEAR, RESHAPE, argument, aten, calls, is_call, is_getitem
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass
from pt2e_quant.graph.views import sizes_of


@graph_pass(needs=(HAS_VALUES,), gives=())
def split_experts(gm: GraphModule) -> PassResult:
    """Give each expert its rows, where `experts_as_linears` gives every expert all of them.

    ONNX has sizes of run time: a Split into as many rows as chose each expert.

    Before:  all = cat([f_0(h), …, f_E(h)], 1)
             y = index_select(reshape(all, [-1, N]), 0, token * E + ids)
    After:   x = index_select(h, 0, token), sorted by ids
             y = joined_rows([f_0(rows_of_expert(x, counts, 0)), …], counts)
    """
    choices = [n for n in gm.graph.nodes if n.target is aten.index_select.default]
    if not choices:
        return PassResult(changed=False)
    editor, notes = Editor(gm), []
    places = {node: at for at, node in enumerate(gm.graph.nodes)}
    constants = constant_nodes(gm.graph)
    for node in choices:
        found = _find(node, constants, places)
        if found is not None:
            _split(found, editor)
            notes.append(Note(node.name, f"{len(found.parts)} experts compute their own rows"))
    return PassResult(changed=editor.finish(), notes=tuple(notes))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Experts:
    """Linears of every row and a choice behind them.

    Args:
        choice: the index_select.
        parts: what each expert makes of all rows, [T, N].
        joined: the quantize and dequantize between their concatenation and the choice, if any.
        tokens: int[S], the row that is read for each result.
        ids: int[S], the expert that makes it.
        base: the rows that all experts read.
        chains: of each expert, the operators between its rows and its part, in order.
    """

    choice: Node
    parts: Sequence[Node]
    joined: Sequence[Node]
    tokens: Node
    ids: Node
    base: Node
    chains: Sequence[Sequence[Node]]


def _find(choice: Node, constants: Collection[Node], order: Mapping[Node, int]) -> _Experts | None:
    table, around = _behind_qdq(argument(choice, "self"))
    if argument(choice, "dim") != 0 or not calls(table, RESHAPE):
        return None
    cat, joined = _behind_qdq(table.args[0])
    if not calls(cat, CAT) or cat.meta["val"].dim() != 2 or argument(cat, "dim") not in (1, -1):
        return None
    parts: Sequence[Node] = argument(cat, "tensors")
    places = _places(argument(choice, "index"), len(parts))
    if places is None or len(parts) < 2 or len(set(parts)) < len(parts):
        return None
    between = [cat, *joined, table, *around]
    if any(len(n.users) != 1 for n in between):
        return None
    chains = [_chain(part, constants, order) for part in parts]
    bases = {source for chain in chains for source in _sources(chain, constants)}
    if len(bases) != 1 or not all(chains):
        return None
    (base,) = bases
    value = base.meta["val"]
    if not isinstance(value, Tensor) or value.dim() != 2:
        return None
    tokens, ids = places
    return _Experts(
        choice=choice,
        parts=parts,
        joined=joined or around,
        tokens=tokens,
        ids=ids,
        base=base,
        chains=chains,
    )


def _behind_qdq(node: Any) -> tuple[Any, tuple[Node, ...]]:
    """The node in front of a quantize and a dequantize, and both in order; itself without them."""
    if isinstance(node, Node) and is_dequantize(node):
        quantize = node.args[0]
        if isinstance(quantize, Node) and is_quantize(quantize):
            return quantize.args[0], (quantize, node)
    return node, ()


def _places(node: Any, count: int) -> tuple[Node, Node] | None:
    """(token, ids) of `token * count + ids`."""
    if not calls(node, (aten.add.Tensor,)) or node.kwargs:
        return None
    product, ids = node.args
    if not calls(product, (aten.mul.Tensor,)) or product.args[1] != count:
        return None
    token = product.args[0]
    return (token, ids) if isinstance(token, Node) and isinstance(ids, Node) else None


def _chain(part: Node, constants: Collection[Node], order: Mapping[Node, int]) -> list[Node]:
    """The operators of rows that only one expert's part is made by, and what quantizes their rows.

    Experts share the integers of the rows that they read; each can quantize its own as well.
    """
    chain: set[Node] = set()
    asked: Counter[Node] = Counter()
    stack = [part]
    while stack:
        node = stack.pop()
        asked[node] += 1
        is_alone = asked[node] == len(node.users)
        if node in chain or not (is_alone or _is_qdq_of_rows(node)):
            continue
        if _is_row_operator(node, constants):
            chain.add(node)
            stack += _rows_read(node, constants)
    return sorted(chain, key=order.__getitem__)


def _is_row_operator(node: Node, constants: Collection[Node]) -> bool:
    if is_call(node, LINEAR) or _is_qdq_of_rows(node):
        return True
    held = [n.meta["val"] for n in node.all_input_nodes if n in constants]
    return is_by_row(node) and all(map(is_one_row, held))


def _is_qdq_of_rows(node: Node) -> bool:
    """True for what quantizes or dequantizes each row by itself, or finds the row's scale."""
    if is_getitem(node):
        return calls(node.args[0], (ChoosePerToken,))
    return is_quantize(node) or is_dequantize(node) or node.target is ChoosePerToken


def _rows_read(node: Node, constants: Collection[Node]) -> list[Node]:
    """The operands that have the rows of the result."""
    if is_call(node, LINEAR):
        return [argument(node, "input")]
    return [n for n in node.all_input_nodes if n not in constants and not _is_of_all_rows(n)]


def _is_of_all_rows(node: Node) -> bool:
    """True for a scale or a zero point that is found for a whole tensor."""
    return is_getitem(node) and getattr(node.args[0], "target", None) in (
        CHOOSE_QPARAMS_OPS - {ChoosePerToken}
    )


def _sources(chain: Sequence[Node], constants: Collection[Node]) -> set[Node]:
    """What the operators of a chain read and is not in it."""
    inside = set(chain)
    return {n for node in chain for n in _rows_read(node, constants) if n not in inside}


def _split(found: _Experts, editor: Editor) -> None:
    choice, count = found.choice, len(found.parts)

    def call(target: Any, *args: Any, **kwargs: Any) -> Node:
        return editor.call(target, *args, like=choice, before=choice, **kwargs)

    ids, tokens, unsorted = found.ids, found.tokens, None
    if not are_sorted(ids):
        ordered = call(aten.sort.default, ids)
        ids, order = call(getitem, ordered, 0), call(getitem, ordered, 1)
        tokens = call(aten.index_select.default, tokens, 0, order)
        unsorted = call(getitem, call(aten.sort.default, order), 1)
    numbers = call(aten.arange.default, count)
    is_of = call(
        aten.eq.Tensor,
        call(aten.unsqueeze.default, numbers, 1),
        call(aten.unsqueeze.default, ids, 0),
    )
    counts = call(aten.sum.dim_IntList, is_of, [1])
    rows = call(aten.index_select.default, found.base, 0, tokens)
    scores = scores_of(found.ids, count)
    # The experts of one token differ: none has more than its row.
    is_one = scores is not None and list(scores.meta["val"].shape) == [1, count]
    (most,) = [1] if is_one else sizes_of(ids, editor, like=choice, before=choice)
    parts = [
        _of_expert(found, at, call(RowsOfExpert, rows, counts, at, most), editor)
        for at in range(count)
    ]
    made = call(JoinedRows, parts, counts, ids)
    for node in found.joined:
        made = call(node.target, made, *node.args[1:], **node.kwargs)
    if unsorted is not None:
        made = call(aten.index_select.default, made, 0, unsorted)
    editor.replace(choice, made)


def _of_expert(found: _Experts, at: int, rows: Node, editor: Editor) -> Node:
    """What one expert makes of its own rows."""
    copies = {found.base: rows}
    for node in found.chains[at]:
        operands: Any = map_arg((node.args, node.kwargs), lambda n: copies.get(n, n))
        args, kwargs = operands
        made = editor.call(node.target, *args, like=node, before=found.choice, **kwargs)
        made.meta |= {key: held for key, held in node.meta.items() if key not in made.meta}
        copies[node] = made
    return copies[found.parts[at]]
