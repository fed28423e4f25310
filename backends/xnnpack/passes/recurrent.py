"""Recurrent layers in a `.pte`: one product of all inputs, and a loop over the steps."""

from collections.abc import Collection
from operator import getitem
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from pt2e_quant.core.qdq import (
    ChoosePerToken,
    DequantizePerChannel,
    DequantizePerToken,
    QuantizePerToken,
)
from pt2e_quant.core.recurrent_ops import (
    Cell,
    RecurrentLayer,
    Rounding,
    gate_count,
)
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.ops import arguments, aten
from pt2e_quant.graph.pipeline import Note, PassResult, graph_pass
from pt2e_quant.graph.recurrent_pattern import recurrent_row
from pt2e_quant.passes.recurrent.split_recurrent import LayerSizes, split_recurrent

RECURRENT_ROW = recurrent_row(
    "FullyConnected of all inputs, and a loop over one partition for a step",
    "inputs and hidden states are rounded to int8 per row at run time, also in static recipes",
)
STEPS_KEY = "pt2e_quant.recurrent_steps"
"""Key of `gm.meta`: the `Step` of each call of `RecurrentSteps`, by the name in its arguments."""

_LIMITS = -128, 127, torch.int8
_LIBRARY = torch.library.Library("pt2e_quant", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's own
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "recurrent_steps(Tensor[] gates, Tensor[] states, str step) -> (Tensor, Tensor[])"
)


def _fake(gates: list[Tensor], states: list[Tensor], step: str) -> tuple[Tensor, list[Tensor]]:
    h = states[0]
    y = h.new_empty((gates[0].shape[0], *h.shape))
    return y, [torch.empty_like(state) for state in states]


torch.library.register_fake("pt2e_quant::recurrent_steps", lib=_LIBRARY)(_fake)
RecurrentSteps = torch.ops.pt2e_quant.recurrent_steps.default
"""All hidden states float32[T, B, P] and the last states; only lowered, never run.

    gates: of each gate the inputs' part float32[T, B, H]; of a GRU with biases also the last
        recurrent one in every step: the delegate takes no constant operand of a sum.
    states: h0, and an LSTM's c0.
    step: a name in `STEPS_KEY`.
"""


def recurrent_form(
    sizes: LayerSizes, rounds_activations: bool, _: Collection[str]
) -> Rounding | str:
    """Return the rounding of a layer's operands."""
    return Rounding.PER_ROW if rounds_activations else Rounding.NONE


split_left = split_recurrent(lambda node, sizes: Rounding.NONE)
"""Operators left in float become loops too: ExecuTorch's export would write every step out."""


class Step(nn.Module):
    """One step of a layer, from the inputs' part of each gate and the states to the next states.

    Args:
        cell: what it computes.
        rounding: how the hidden state is rounded.
        gates: for each gate the recurrent weight; int8[H, P] with scale float32[H], or float.
        projection: of the hidden state, int8[P, H] with a scale or float.
    """

    def __init__(
        self,
        cell: Cell,
        rounding: Rounding,
        gates: list[tuple[Tensor, Tensor | None]],
        projection: tuple[Tensor, Tensor | None] | None,
    ) -> None:
        super().__init__()
        self.cell, self.rounding, self.count = cell, rounding, len(gates)
        for i, (weight, scale) in enumerate([*gates, *([projection] if projection else [])]):
            self.register_buffer(f"weight_{i}", weight)
            self.register_buffer(f"scale_{i}", scale)
            zeros = None if scale is None else torch.zeros(len(scale), dtype=torch.int64)
            self.register_buffer(f"zero_point_{i}", zeros)
        self.has_projection = projection is not None

    def _product(self, x: Tensor, index: int) -> Tensor:
        weight, scale = getattr(self, f"weight_{index}"), getattr(self, f"scale_{index}")
        if scale is not None:
            zeros = getattr(self, f"zero_point_{index}")
            weight = DequantizePerChannel(weight, scale, zeros, 0, -127, 127, torch.int8)
        return F.linear(x, weight)

    def _rounded(self, x: Tensor) -> Tensor:
        if self.rounding is Rounding.NONE:
            return x
        scales, zeros = ChoosePerToken(x, torch.int8)
        codes = QuantizePerToken(x, scales, zeros, *_LIMITS)
        real: Tensor = DequantizePerToken(codes, scales, zeros, *_LIMITS, torch.float32)
        return real

    def forward(self, states: list[Tensor], gates: list[Tensor]) -> list[Tensor]:
        """The next states, and the first of them once more, as what the loop keeps."""
        h = states[0]
        rounded = self._rounded(h)
        products = [self._product(rounded, i) for i in range(self.count)]
        if self.cell is Cell.GRU:
            reset, update, new, *bias = gates
            last = products[2] + bias[0] if bias else products[2]
            new = torch.tanh(new + torch.sigmoid(reset + products[0]) * last)
            h = new + torch.sigmoid(update + products[1]) * (h - new)
            return [h, h]
        sums = [gate + product for gate, product in zip(gates, products, strict=True)]
        if self.cell is Cell.LSTM:
            i, f, g, o = sums
            c = torch.sigmoid(f) * states[1] + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            h = self._product(self._rounded(h), self.count) if self.has_projection else h
            return [h, c, h]
        h = torch.tanh(sums[0]) if self.cell is Cell.RNN_TANH else torch.relu(sums[0])
        return [h, h]


@graph_pass(needs=(), gives=())
def recurrent_as_steps(gm: GraphModule) -> PassResult:
    """Multiply the inputs of all steps at once, in front of a call that a loop takes the place of.

    Before:  y, c = recurrent_layer(x, h0, c0, dq(w_ih), dq(w_hh), b_ih, b_hh, …, "per_row")
    After:   q = dq(q(x)) per row; gates = [linear(q, dq(w_ih of the gate), b_ih + b_hh), …]
             y, [h, c] = recurrent_steps(gates, [h0, c0], name)

    A weight is cut into one for each gate: the delegate's slices take fixed sizes alone.
    """
    editor = Editor(gm)
    steps: dict[str, Step] = {}
    found = [n for n in gm.graph.nodes if n.target is RecurrentLayer]
    for node in found:
        _Layer(editor, node, steps).replace()
    gm.meta[STEPS_KEY] = steps
    notes = tuple(Note(node.name, "a loop over its steps") for node in found)
    return PassResult(editor.finish(), notes)


class _Layer:
    """One layer, and what takes its place."""

    def __init__(self, editor: Editor, node: Node, steps: dict[str, Step]) -> None:
        self.editor, self.node, self.steps = editor, node, steps
        self.named = arguments(node)
        self.cell = Cell(self.named["cell"])
        self.rounding = Rounding(self.named["rounding"])

    def replace(self) -> None:
        """Let the layer's readers read what it is made of."""
        named, name = self.named, self.node.name
        self.steps[name] = Step(
            self.cell,
            self.rounding,
            self._parts("w_hh"),
            self._stored("w_hr") if named["w_hr"] is not None else None,
        )
        states = [named["h0"], *([named["c0"]] if self.cell is Cell.LSTM else [])]
        made = self._call(RecurrentSteps, self._gates(), states, name)
        for user in list(self.node.users):
            if user.args[1] == 0:
                self.editor.replace(user, self._flipped(self._item(made, 0)))
            else:
                last = self._item(self._item(made, 1), 1) if len(states) > 1 else made
                self.editor.replace(user, last)
        self.editor.discard([self.node])

    def _gates(self) -> list[Node]:
        x = self._rounded(self._flipped(self.named["x"]))
        b_ih, b_hh = self._bias("b_ih"), self._bias("b_hh")
        gates = []
        for i, part in enumerate(self._parts("w_ih")):
            weight = self._weight(part, f"w_ih_{i}")
            bias = None
            if b_ih is not None and b_hh is not None:
                is_kept = self.cell is Cell.GRU and i == 2
                bias = b_ih[i].clone() if is_kept else b_ih[i] + b_hh[i]
            held = None if bias is None else self._held(f"bias_{i}", bias)
            gates.append(self._call(aten.linear.default, x, weight, held))
        if b_hh is not None and self.cell is Cell.GRU:
            last = self._held("bias_hn", b_hh[2].clone())
            gates.append(self._call(aten.expand_as.default, last, gates[2]))
        return gates

    def _rounded(self, x: Node) -> Node:
        if self.rounding is Rounding.NONE:
            return x
        both = self._call(ChoosePerToken, x, torch.int8)
        qparams = self._item(both, 0), self._item(both, 1)
        codes = self._call(QuantizePerToken, x, *qparams, *_LIMITS)
        return self._call(DequantizePerToken, codes, *qparams, *_LIMITS, torch.float32)

    def _weight(self, part: tuple[Tensor, Tensor | None], name: str) -> Node:
        weight, scale = part
        held = self._held(name, weight)
        if scale is None:
            return held
        zeros = self._held(f"{name}_zero_point", torch.zeros(len(scale), dtype=torch.int64))
        qparams = self._held(f"{name}_scale", scale), zeros
        return self._call(DequantizePerChannel, held, *qparams, 0, -127, 127, torch.int8)

    def _parts(self, name: str) -> list[tuple[Tensor, Tensor | None]]:
        """A weight's rows for each gate."""
        weight, scale = self._stored(name)
        count = gate_count(self.cell)
        scales = [None] * count if scale is None else [s.clone() for s in scale.chunk(count)]
        return list(zip([w.clone() for w in weight.chunk(count)], scales, strict=True))

    def _stored(self, name: str) -> tuple[Tensor, Tensor | None]:
        source: Node = self.named[name]
        if source.target is not DequantizePerChannel:
            return self._constant(source), None
        integers, scale = source.args[:2]
        return self._constant(integers), self._constant(scale).float()

    def _bias(self, name: str) -> tuple[Tensor, ...] | None:
        source = self.named[name]
        return None if source is None else self._constant(source).chunk(gate_count(self.cell))

    def _constant(self, node: Any) -> Tensor:
        found = constant_of(self.editor.gm, node)
        assert found is not None  # of a module's weight
        return found

    def _held(self, name: str, value: Tensor) -> Node:
        return self.editor.constant(f"{self.node.name}.{name}", value, like=self.node)

    def _flipped(self, value: Node) -> Node:
        return self._call(aten.flip.default, value, [0]) if self.named["is_reverse"] else value

    def _item(self, value: Node, index: int) -> Node:
        return self._call(getitem, value, index)

    def _call(self, target: Any, *args: Any) -> Node:
        return self.editor.call(target, *args, like=self.node, before=self.node)
