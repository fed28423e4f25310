"""Split recurrent operators into a call for each layer and direction, and cells into linears."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch.fx import GraphModule, Node

from pt2e_quant.core.recurrent_ops import ROUNDING_KEY, Cell, RecurrentLayer, Rounding
from pt2e_quant.graph.editor import Editor, operator_name
from pt2e_quant.graph.op_table import SOURCE_KEY
from pt2e_quant.graph.ops import RECURRENT, RECURRENT_CELL, arguments, aten, is_call, is_getitem
from pt2e_quant.graph.pipeline import HAS_VALUES, GraphPass, Note, PassResult
from pt2e_quant.passes.recurrent.write_steps import StepWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSizes:
    """The sizes of one layer, by which its form is chosen.

    Args:
        cell: its kind.
        inputs: features of the input.
        hidden: hidden values.
        has_projection: whether an LSTM's hidden state is projected.
    """

    cell: Cell
    inputs: int
    hidden: int
    has_projection: bool


RoundingOf = Callable[[Node, LayerSizes], Rounding | str]
"""Of a recurrent operator and one of its layers: how its products' operands are rounded, or why
the operator is left as it is."""


def split_recurrent(rounding_of: RoundingOf) -> GraphPass:
    """The pass that splits each recurrent operator into single layers of one direction.

    Before:  y, h, c = lstm(x, [h0, c0], [w_ih, w_hh, …], True, 2, 0.0, False, False, True)
    After:   t = transpose(x, 0, 1)
             y0, c0' = recurrent_layer(t, h0[0], c0[0], w_ih, w_hh, …, "lstm", False, "none")
             y1, c1' = recurrent_layer(y0, h0[1], c0[1], …)
             y = transpose(y1, 0, 1); h = stack([y0[-1], y1[-1]]); c = stack([c0', c1'])

    How a layer is to round stands in its metadata until convert (`round_recurrent`).

    Args:
        rounding_of: decides on each layer.
    """

    def edit(gm: GraphModule) -> PassResult:
        editor = Editor(gm)
        notes = []
        for node in [n for n in gm.graph.nodes if is_call(n, RECURRENT)]:
            stack = _Stack(editor, node)
            roundings = stack.roundings(rounding_of)
            if isinstance(roundings, str):
                notes.append(Note(node.name, roundings, skipped=True))
                continue
            stack.replace(roundings)
            notes.append(Note(node.name, f"split into {len(roundings)} layers"))
        return PassResult(editor.finish(), tuple(notes))

    return GraphPass("split_recurrent", edit, needs=(HAS_VALUES,), gives=())


class _Stack:
    """The layers of one recurrent operator."""

    def __init__(self, editor: Editor, node: Node) -> None:
        named = arguments(node)
        self.editor, self.node = editor, node
        self.x: Node = named["input"]
        self.cell = Cell(operator_name(node.target))
        self.states: list[Node] = list(named["hx"]) if self.cell is Cell.LSTM else [named["hx"]]
        self.is_batch_first = bool(named["batch_first"])
        self.directions = 2 if named["bidirectional"] else 1
        self.drops = bool(named["train"]) and named["dropout"] > 0
        self.has_biases = bool(named["has_biases"])
        params: list[Node] = list(named["params"])
        calls = int(named["num_layers"]) * self.directions
        each = len(params) // calls
        self.weights = [params[i * each : (i + 1) * each] for i in range(calls)]

    def roundings(self, rounding_of: RoundingOf) -> list[Rounding] | str:
        """One for each layer and direction, or why the operator is left."""
        if self.drops:
            return "it drops values at random between its layers"
        found = []
        for weights in self.weights:
            dtypes = {w.meta["val"].dtype for w in weights}
            if dtypes != {torch.float32}:
                return "its weights are not float32"
            rounding = rounding_of(self.node, self._sizes(weights))
            if not isinstance(rounding, Rounding):
                return rounding
            found.append(rounding)
        return found

    def _sizes(self, weights: Sequence[Node]) -> LayerSizes:
        w_ih, w_hh = (w.meta["val"] for w in weights[:2])
        has_projection = self._projection(weights) is not None
        hidden = weights[-1].meta["val"].shape[1] if has_projection else w_hh.shape[1]
        return LayerSizes(
            cell=self.cell,
            inputs=int(w_ih.shape[1]),
            hidden=int(hidden),
            has_projection=has_projection,
        )

    def _projection(self, weights: Sequence[Node]) -> Node | None:
        return weights[-1] if len(weights) > (4 if self.has_biases else 2) else None

    def replace(self, roundings: Sequence[Rounding]) -> None:
        """Write the layers in front of the operator and let its readers read them."""
        x = self._call(aten.transpose.int, self.x, 0, 1) if self.is_batch_first else self.x
        lasts, cells = [], []
        for first in range(0, len(roundings), self.directions):
            made = []
            for place in range(first, first + self.directions):
                y, c = self._layer(x, place, roundings[place])
                made.append(y)
                lasts.append((y, 0 if place % self.directions else -1))
                cells.append(c)
            x = made[0] if len(made) == 1 else self._call(aten.cat.default, made, -1)
        read = {int(u.args[1]): u for u in self.node.users if is_getitem(u)}  # type: ignore[arg-type]  # a literal
        if 0 in read and read[0].users:
            back = self._call(aten.transpose.int, x, 0, 1) if self.is_batch_first else x
            self.editor.replace(read[0], back)
        if 1 in read and read[1].users:
            ends = [self._call(aten.select.int, y, 0, at) for y, at in lasts]
            self.editor.replace(read[1], self._call(aten.stack.default, ends, 0))
        if 2 in read and read[2].users:
            ends = [self._call(getitem, c, 1) for c in cells]
            self.editor.replace(read[2], self._call(aten.stack.default, ends, 0))
        self.editor.discard([*read.values(), self.node])

    def _layer(self, x: Node, place: int, rounding: Rounding) -> tuple[Node, Node]:
        """The result of a layer, and the call."""
        weights = self.weights[place]
        biases = weights[2:4] if self.has_biases else (None, None)
        states = [self._call(aten.select.int, state, 0, place) for state in self.states]
        made = self._call(
            RecurrentLayer,
            x,
            states[0],
            states[1] if self.cell is Cell.LSTM else None,
            *weights[:2],
            *biases,
            self._projection(weights),
            str(self.cell),
            place % self.directions == 1,
            str(Rounding.NONE),
        )
        if rounding is not Rounding.NONE:
            made.meta[ROUNDING_KEY] = str(rounding)
        made.meta[SOURCE_KEY] = f"aten.{self.cell}"
        return self._call(getitem, made, 0), made

    def _call(self, target: Any, *args: Any) -> Node:
        return self.editor.call(target, *args, like=self.node, before=self.node)


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
        self.steps = StepWriter(editor, node, self.cell)

    def replace(self) -> None:
        """Let the cell's readers read the operators that replace it."""
        named, steps = self.named, self.steps
        h, c = named["hx"] if self.cell is Cell.LSTM else (named["hx"], None)
        x = steps.op(aten.linear.default, named["input"], named["w_ih"], named["b_ih"])
        made = steps.step(x, h, c, named["w_hh"], named["b_hh"])
        if self.cell is not Cell.LSTM:
            self.editor.replace(self.node, made[0])
            return
        read = [user for user in self.node.users if is_getitem(user)]
        for user in read:
            self.editor.replace(user, made[int(user.args[1])])  # type: ignore[arg-type]  # a literal
        self.editor.discard([*read, self.node, *made])  # type: ignore[list-item]  # an LSTM's nodes
