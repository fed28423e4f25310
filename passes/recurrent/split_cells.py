"""Write recurrent cells out as two linears and their gates."""

from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule, Node

from pt2e_quant.core.recurrent_ops import Cell, gate_count
from pt2e_quant.graph.editor import Editor, operator_name
from pt2e_quant.graph.ops import RECURRENT_CELL, arguments, aten, is_call, is_getitem
from pt2e_quant.graph.pipeline import HAS_VALUES, GraphPass, Note, PassResult


def split_cells(is_wanted: Callable[[Node], bool]) -> GraphPass:
    """The pass that writes cells out, so that their products are linears like any other.

    Before:  h, c = lstm_cell(x, [h0, c0], w_ih, w_hh, b_ih, b_hh)
    After:   i, f, g, o = slices of linear(x, w_ih, b_ih) + linear(h0, w_hh, b_hh)
             c = sigmoid(f) * c0 + sigmoid(i) * tanh(g);  h = sigmoid(o) * tanh(c)

    Args:
        is_wanted: which cells; the others stay as they are.
    """

    def edit(gm: GraphModule) -> PassResult:
        editor = Editor(gm)
        found = [n for n in gm.graph.nodes if is_call(n, RECURRENT_CELL) and is_wanted(n)]
        for node in found:
            _Writer(editor, node).replace()
        notes = tuple(Note(node.name, "as linears and gates") for node in found)
        return PassResult(editor.finish(), notes)

    return GraphPass("split_cells", edit, needs=(HAS_VALUES,), gives=())


class _Writer:
    """The operators of one cell, in front of it."""

    def __init__(self, editor: Editor, node: Node) -> None:
        self.editor, self.node = editor, node
        self.named = arguments(node)
        self.cell = Cell(operator_name(node.target).removesuffix("_cell"))

    def replace(self) -> None:
        """Let the cell's readers read what it is made of."""
        hx = self.named["hx"]
        if self.cell is Cell.LSTM:
            self._replace_lstm(*hx)
        elif self.cell is Cell.GRU:
            self.editor.replace(self.node, self._gru(hx))
        else:
            run = aten.tanh.default if self.cell is Cell.RNN_TANH else aten.relu.default
            x, h = self._products(hx)
            self.editor.replace(self.node, self._op(run, self._op(aten.add.Tensor, x, h)))

    def _replace_lstm(self, h: Node, c: Node) -> None:
        op, add, mul = self._op, aten.add.Tensor, aten.mul.Tensor
        sigmoid, tanh = aten.sigmoid.default, aten.tanh.default
        i, f, g, o = self._gates(op(add, *self._products(h)))
        kept = op(mul, op(sigmoid, f), c)
        c = op(add, kept, op(mul, op(sigmoid, i), op(tanh, g)))
        h = op(mul, op(sigmoid, o), op(tanh, c))
        read = [user for user in self.node.users if is_getitem(user)]
        for user in read:
            self.editor.replace(user, (h, c)[int(user.args[1])])  # type: ignore[arg-type]  # a literal
        self.editor.discard([*read, self.node, h, c])

    def _gru(self, h: Node) -> Node:
        op, add, mul = self._op, aten.add.Tensor, aten.mul.Tensor
        x, state = self._products(h)
        x_r, x_z, x_n = self._gates(x)
        h_r, h_z, h_n = self._gates(state)
        reset = op(aten.sigmoid.default, op(add, x_r, h_r))
        update = op(aten.sigmoid.default, op(add, x_z, h_z))
        new = op(aten.tanh.default, op(add, x_n, op(mul, reset, h_n)))
        return op(add, new, op(mul, update, op(aten.sub.Tensor, h, new)))

    def _products(self, h: Node) -> tuple[Node, Node]:
        named, linear = self.named, aten.linear.default
        return (
            self._op(linear, named["input"], named["w_ih"], named["b_ih"]),
            self._op(linear, h, named["w_hh"], named["b_hh"]),
        )

    def _gates(self, values: Node) -> list[Node]:
        width = self.named["w_hh"].meta["val"].shape[1]
        count = gate_count(self.cell)
        ends = [(i * width, (i + 1) * width) for i in range(count)]
        return [self._op(aten.slice.Tensor, values, -1, *end) for end in ends]

    def _op(self, target: Any, *args: Any) -> Node:
        return self.editor.call(target, *args, like=self.node, before=self.node)
