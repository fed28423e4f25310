"""Write products by matrices that each row chooses as linears, one for each matrix."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.idioms.experts import (
    ROUTER_KEY,
    ExpertProduct,
    expert_product,
    is_by_row,
    is_one_row,
    routers_of,
    taken_rows,
)
from pt2e_quant.graph.meta import attribute, constant_of
from pt2e_quant.graph.ops import aten, is_call
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass
from pt2e_quant.graph.rewrite import Skip
from pt2e_quant.graph.views import sizes_of


@graph_pass(needs=(HAS_VALUES,), gives=())
def experts_as_linears(gm: GraphModule) -> PassResult:
    """Write the experts of a mixture of experts as linears of every row, and choose behind them.

    Linears are quantized, calibrated and rounded as those of other layers are. What stands between
    the two products of an expert is written for each expert too, so that the rows of a token that
    several experts read are computed once by each. A runtime with sizes of run time can leave out
    the rows that an expert is not chosen for.

    Before:  y = grouped_mm(index(h, [token]), w, cumsum(histc(ids)))        w: [E, K, N]
    After:   all = cat([linear(h, w[0].T), …, linear(h, w[E - 1].T)], 1)
             y = index_select(reshape(all, [-1, N]), 0, token * E + ids)
    """
    writer, notes = _Writer(Editor(gm)), []
    for node in list(gm.graph.nodes):
        product = expert_product(gm, node)
        if isinstance(product, Skip):
            notes.append(Note(node.name, product.reason, skipped=True))
        elif product is not None:
            writer.write(product)
            notes.append(Note(node.name, f"written as {len(product.weights)} linears"))
    return PassResult(changed=writer.editor.finish(), notes=tuple(notes))


@dataclass(frozen=True, slots=True)
class _Each:
    """What every expert makes of every row: a node for each, and which of them are read.

    `y[s] = nodes[ids[s]][rows[s]]`; without `rows` of row s itself.
    """

    nodes: tuple[Node, ...]
    ids: Node
    rows: Node | None


class _Writer:
    def __init__(self, editor: Editor) -> None:
        self.editor = editor
        self._each: dict[Node, _Each | None] = {}
        self._numbers: dict[Node, Node] = {}

    def write(self, product: ExpertProduct) -> None:
        """Put linears and a choice in the place of a product, and of the bias behind it."""
        value, bias = product.value, self._bias(product)
        if bias is not None:
            value = next(iter(product.value.users))
        x, like = self.editor.now(product.x), product.value
        before = self._of(x, product.ids)
        if before is None:
            base, rows = self._whole(x, like)
            before = _Each((base,) * len(product.weights), product.ids, rows)
        name = str(product.source.target)
        is_parameter = isinstance(attribute(self.editor.gm, name), nn.Parameter)
        made = []
        for at, part in enumerate(before.nodes):
            matrix = product.weights[at].contiguous()
            held = nn.Parameter(matrix, requires_grad=False) if is_parameter else matrix
            weight = self.editor.constant(_name_of(name, at), held, like=like)
            added = None if bias is None else self._row(bias, at)
            made.append(
                self.editor.call(aten.linear.default, part, weight, added, like=like, before=value)
            )
        each = _Each(tuple(made), product.ids, before.rows)
        chosen = self._chosen(each, product, value)
        self.editor.replace(value, chosen)
        self._each[chosen] = each
        for router in routers_of(product.ids, len(product.weights)):
            router.meta[ROUTER_KEY] = True

    def _bias(self, product: ExpertProduct) -> Node | None:
        """The table [E, N] whose rows are added to a product, if one is."""
        reader, *others = product.value.users
        if others or not is_call(reader, (aten.add.Tensor,)) or reader.kwargs:
            return None
        added = next((n for n in reader.all_input_nodes if n is not product.value), None)
        return None if added is None else self._table(added, product.ids)

    def _table(self, node: Node, ids: Node) -> Node | None:
        """The constant [E, N] of which a node takes the row of each expert that is chosen."""
        taken = taken_rows(node)
        if taken is None or taken[1] is not ids:
            return None
        return None if constant_of(self.editor.gm, taken[0]) is None else taken[0]

    def _row(self, table: Node, at: int) -> Node:
        held = constant_of(self.editor.gm, table)
        assert held is not None
        row: Tensor = held[at].detach().clone()
        return self.editor.constant(_name_of(str(table.target), at), row, like=table)

    def _whole(self, x: Node, like: Node) -> tuple[Node, Node | None]:
        """The matrix that rows were gathered from, and which were; themselves if none was."""
        taken = taken_rows(x)
        if taken is not None and self._is_no_larger(taken[0], x):
            return taken
        if is_call(x, (aten.repeat_interleave.self_int,)) and x.args[2:] == (0,):
            base, count = x.args[:2]
            assert isinstance(base, Node)
            if x not in self._numbers:
                (size, _) = sizes_of(base, self.editor, like=like, before=x)
                numbers = self.editor.call(aten.arange.default, size, like=like, before=x)
                self._numbers[x] = self.editor.call(x.target, numbers, count, 0, like=x, before=x)
            return base, self._numbers[x]
        return x, None

    def _is_no_larger(self, base: Node, x: Node) -> bool:
        """False for a table, and for more rows than are taken of them."""
        before, after = (n.meta["val"].shape[0] for n in (base, x))
        is_known = isinstance(before, int) and isinstance(after, int)
        return constant_of(self.editor.gm, base) is None and not (is_known and before > after)

    def _chosen(self, each: _Each, product: ExpertProduct, value: Node) -> Node:
        count, width = len(each.nodes), product.weights.shape[1]

        def call(target: object, *args: object) -> Node:
            return self.editor.call(target, *args, like=value, before=value)

        ids, rows = product.ids, each.rows
        if not product.are_ids_known:
            # Negative ones count from the end.
            ids = call(aten.remainder.Scalar, ids, count)
        if rows is None:
            (size, _) = sizes_of(self.editor.now(product.x), self.editor, like=value, before=value)
            rows = call(aten.arange.default, size)
        joined = call(aten.cat.default, list(each.nodes), 1)
        table = call(aten.reshape.default, joined, [-1, width])
        places = call(aten.add.Tensor, call(aten.mul.Tensor, rows, count), ids)
        return call(aten.index_select.default, table, 0, places)

    def _of(self, node: Node, ids: Node) -> _Each | None:
        """What a value is for every expert and row, if it is made by row of chosen ones."""
        if node not in self._each:
            self._each[node] = self._made_by_row(node, ids)
        found = self._each[node]
        return found if found is not None and found.ids is ids else None

    def _made_by_row(self, node: Node, ids: Node) -> _Each | None:
        if not is_by_row(node):
            return None
        operands: dict[Node, _Each | None] = {n: self._of(n, ids) for n in node.all_input_nodes}
        known = [each for each in operands.values() if each is not None]
        if not known or any(each.rows is not known[0].rows for each in known):
            return None
        parts: dict[Node, tuple[Node, ...]] = {}
        for operand, each in operands.items():
            if each is not None:
                parts[operand] = each.nodes
            elif (table := self._table(operand, ids)) is not None:
                parts[operand] = tuple(self._row(table, at) for at in range(len(known[0].nodes)))
            elif (held := constant_of(self.editor.gm, operand)) is None or not is_one_row(held):
                return None
        count = len(known[0].nodes)
        made = tuple(self._copied(node, at, parts) for at in range(count))
        return _Each(made, known[0].ids, known[0].rows)

    def _copied(self, node: Node, at: int, parts: Mapping[Node, Sequence[Node]]) -> Node:
        """An operator of rows for one expert."""

        def operand(n: Node) -> Node:
            return parts[n][at] if n in parts else n

        operands: Any = map_arg((node.args, node.kwargs), operand)
        args, kwargs = operands
        return self.editor.call(node.target, *args, like=node, before=node, **kwargs)


def _name_of(name: str, at: int) -> str:
    """The name of an expert's part of a constant, as checkpoints of single experts write it."""
    owner, dot, leaf = name.rpartition(".")
    return f"{owner}{dot}{at}.{leaf}"
