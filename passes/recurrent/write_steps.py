"""Write the steps of recurrent layers out: each product and gate is an operator of its own."""

from operator import getitem
from typing import Any

from torch.fx import GraphModule, Node

from pt2e_quant.core.recurrent_ops import Cell, RecurrentLayer, gate_count
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.ops import SELECT, arguments, aten, is_call, is_getitem
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass
from pt2e_quant.passes.cleanup.unroll_loops import MOST_ROUNDS


class StepWriter:
    """The operators of one step, in front of a node.

    Args:
        editor: of the graph.
        node: the cell or layer.
        cell: its kind.
    """

    def __init__(self, editor: Editor, node: Node, cell: Cell) -> None:
        self.editor, self.node, self.cell = editor, node, cell

    def op(self, target: Any, *args: Any) -> Node:
        """A call in front of the node."""
        return self.editor.call(target, *args, like=self.node, before=self.node)

    def step(
        self, x: Node, h: Node, c: Node | None, w_hh: Node, b_hh: Node | None
    ) -> tuple[Node, Node | None]:
        """The next hidden state, and an LSTM's next cell state.

        Args:
            x: the gates that the input gives, [B, gates * H].
            h: the hidden state.
            c: the cell state of an LSTM.
            w_hh: by which the hidden state gives its gates.
            b_hh: its bias.
        """
        # A product with a state of zeros would have no scale: its least one lets the bias overflow.
        state = b_hh if b_hh is not None and _is_zeros(self.editor, h) else None
        state = state or self.op(aten.linear.default, h, w_hh, b_hh)
        if self.cell is Cell.LSTM:
            return self._lstm(self.op(aten.add.Tensor, x, state), c, w_hh)
        if self.cell is Cell.GRU:
            return self._gru(x, state, h, w_hh), None
        run = aten.tanh.default if self.cell is Cell.RNN_TANH else aten.relu.default
        return self.op(run, self.op(aten.add.Tensor, x, state)), None

    def _lstm(self, gates: Node, c: Node | None, w_hh: Node) -> tuple[Node, Node]:
        op, add, mul = self.op, aten.add.Tensor, aten.mul.Tensor
        sigmoid, tanh = aten.sigmoid.default, aten.tanh.default
        i, f, g, o = self._gates(gates, w_hh)
        kept = op(mul, op(sigmoid, f), c)
        c = op(add, kept, op(mul, op(sigmoid, i), op(tanh, g)))
        return op(mul, op(sigmoid, o), op(tanh, c)), c

    def _gru(self, x: Node, state: Node, h: Node, w_hh: Node) -> Node:
        op, add, mul = self.op, aten.add.Tensor, aten.mul.Tensor
        x_r, x_z, x_n = self._gates(x, w_hh)
        h_r, h_z, h_n = self._gates(state, w_hh)
        reset = op(aten.sigmoid.default, op(add, x_r, h_r))
        update = op(aten.sigmoid.default, op(add, x_z, h_z))
        new = op(aten.tanh.default, op(add, x_n, op(mul, reset, h_n)))
        return op(add, new, op(mul, update, op(aten.sub.Tensor, h, new)))

    def _gates(self, values: Node, w_hh: Node) -> list[Node]:
        count = gate_count(self.cell)
        width = w_hh.meta["val"].shape[0] // count
        ends = [(i * width, (i + 1) * width) for i in range(count)]
        return [self.op(aten.slice.Tensor, values, -1, *end) for end in ends]


def _is_zeros(editor: Editor, node: Node) -> bool:
    """True if a state is what a layer starts from that is given none."""
    held = constant_of(editor.gm, node)
    if held is not None:
        return not bool(held.any())
    while is_call(node, SELECT):
        node = node.all_input_nodes[0]
    return node.target is aten.zeros.default


@graph_pass(needs=(HAS_VALUES,), gives=())
def write_steps(gm: GraphModule) -> PassResult:
    """Write each recurrent layer of a fixed number of steps out; what it rounds is not rounded.

    Before:  y, c = recurrent_layer(x, h0, c0, w_ih, w_hh, b_ih, b_hh, None, "gru", False, "none")
    After:   gates = linear(x, w_ih, b_ih)
             h1 = step(gates[0], h0); h2 = step(gates[1], h1); …; y = stack([h1, h2, …])
    """
    editor = Editor(gm)
    notes = []
    for node in [n for n in gm.graph.nodes if n.target is RecurrentLayer]:
        steps = arguments(node)["x"].meta["val"].shape[0]
        if not isinstance(steps, int) or steps > MOST_ROUNDS:
            text = f"it has {steps} steps, more than the {MOST_ROUNDS} that are written out"
            notes.append(Note(node.name, text, skipped=True))
            continue
        _write(editor, node, steps)
        notes.append(Note(node.name, f"its {steps} steps are written out"))
    return PassResult(editor.finish(), tuple(notes))


def _write(editor: Editor, node: Node, steps: int) -> None:
    named = arguments(node)
    writer = StepWriter(editor, node, Cell(named["cell"]))
    op, h, c = writer.op, named["h0"], named["c0"]
    gates = op(aten.linear.default, named["x"], named["w_ih"], named["b_ih"])
    found: dict[int, Node] = {}
    for at in reversed(range(steps)) if named["is_reverse"] else range(steps):
        x = op(aten.select.int, gates, 0, at)
        h, c = writer.step(x, h, c, named["w_hh"], named["b_hh"])
        if named["w_hr"] is not None:
            h = op(aten.linear.default, h, named["w_hr"])
        found[at] = h
    read = {int(u.args[1]): u for u in node.users if is_getitem(u)}  # type: ignore[arg-type]  # a literal
    if 0 in read:
        editor.replace(read[0], op(aten.stack.default, [found[at] for at in range(steps)], 0))
    if 1 in read:
        editor.replace(read[1], c if c is not None else op(getitem, node, 1))
    editor.discard([*read.values(), node])
