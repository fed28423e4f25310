"""Recurrent layers in torch's own operators, on weights packed or decoded once."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.backends.fuse_kernels import KERNEL_KEY
from pt2e_quant.core.recurrent_ops import Cell, RecurrentLayer, Rounding
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.ops import arguments, aten
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass
from pt2e_quant.kernels.recurrent_layer.cpu import has_integer_layers
from pt2e_quant.kernels.recurrent_layer.op import RecurrentLayerInt8, decode

_FLOAT = {
    Cell.LSTM: aten.lstm.input,
    Cell.GRU: aten.gru.input,
    Cell.RNN_TANH: aten.rnn_tanh.input,
    Cell.RNN_RELU: aten.rnn_relu.input,
}
_INTEGER = {Cell.LSTM: aten.quantized_lstm.input, Cell.GRU: aten.quantized_gru.input}


@graph_pass(needs=(HAS_VALUES,), gives=())
def pack_recurrent(gm: GraphModule) -> PassResult:
    """Give each recurrent layer the operator that torch runs fastest.

    Before:  y, c = recurrent_layer_int8(x, h0, c0, w_ih, …, "lstm", False, "per_tensor")
    After:   y, h, c = quantized_lstm(x, [h0[None], c0[None]], [packed], True, 1, …)
             or, with rounding "none", lstm(x, [h0[None], c0[None]], [decoded, …], True, 1, …)

    On a machine without exact products of integers all weights are decoded. Layers of float weights
    (`recurrent_layer` behind no dequantize) become torch's float ones too.
    """
    editor = Editor(gm)
    found = [n for n in gm.graph.nodes if n.target in (RecurrentLayer, RecurrentLayerInt8)]
    for node in found:
        _Layer(editor, node).replace()
    notes = tuple(Note(node.name, "packed") for node in found)
    return PassResult(editor.finish(), notes)


class _Layer:
    """One layer, and what takes its place."""

    def __init__(self, editor: Editor, node: Node) -> None:
        self.editor, self.node = editor, node
        self.named = arguments(node)
        self.cell = Cell(self.named["cell"])
        rounding = Rounding(self.named["rounding"])
        y, c = node.meta["val"]
        last = c.new_empty((1, *c.shape))
        self._values = (y, last, last)
        """The fake values of torch's operator; a GRU and an RNN have two, the second unread."""
        self.is_integer = rounding is not Rounding.NONE and has_integer_layers()

    def replace(self) -> None:
        """Let the layer's readers read the new operator."""
        named = self.named
        x = self._flipped(named["x"])
        states = [named["h0"], *([named["c0"]] if self.cell is Cell.LSTM else [])]
        held = [self._call(aten.unsqueeze.default, state, 0) for state in states]
        hx = held if self.cell is Cell.LSTM else held[0]
        made = self._integer(x, hx) if self.is_integer else self._float(x, hx)
        for user in list(self.node.users):
            if user.args[1] == 0:
                self.editor.replace(user, self._flipped(self._call(getitem, made, 0)))
            else:
                last = self._call(getitem, made, 2)
                self.editor.replace(user, self._call(aten.squeeze.dim, last, 0))
        self.editor.discard([self.node])

    def _integer(self, x: Node, hx: Any) -> Node:
        name = self.editor.unique_name(f"packed_{self.node.name}")
        weights = [(self._given(f"w_{n}"), self._given(f"{n}_scale")) for n in ("ih", "hh")]
        biases = [self._constant(n) for n in ("b_ih", "b_hh")]
        setattr(self.editor.gm, name, _pack(weights, biases))
        with self.editor.graph.inserting_before(self.node):
            held = self.editor.graph.create_node("get_attr", name)
        rest = True, 1, 0.0, False, False, False
        kwargs: dict[str, Any] = {}
        if self.cell is Cell.LSTM:
            kwargs = {"dtype": torch.qint8, "use_dynamic": True}
        made = self._call(_INTEGER[self.cell], x, hx, [held], *rest, val=self._values, **kwargs)
        made.meta[KERNEL_KEY] = self.node.meta.get(KERNEL_KEY)
        return made

    def _float(self, x: Node, hx: Any) -> Node:
        weights = [self._decoded(n) for n in ("ih", "hh")]
        biases = [b for n in ("b_ih", "b_hh") if (b := self.named[n]) is not None]
        projection = [self._decoded("hr")] if self.named["w_hr"] is not None else []
        rest = bool(biases), 1, 0.0, False, False, False
        params = [*weights, *biases, *projection]
        return self._call(_FLOAT[self.cell], x, hx, params, *rest, val=self._values)

    def _decoded(self, name: str) -> Node:
        if self.node.target is RecurrentLayer:
            held: Node = self.named[f"w_{name}"]
            return held
        integers, scale = self._given(f"w_{name}"), self._given(f"{name}_scale")
        target = self.editor.unique_name(f"decoded_{self.node.name}_{name}")
        self.editor.gm.register_buffer(target, decode(integers, scale), persistent=False)
        with self.editor.graph.inserting_before(self.node):
            held = self.editor.graph.create_node("get_attr", target)
        held.meta["val"] = self.named[f"w_{name}"].meta["val"].float()
        return held

    def _constant(self, name: str) -> Tensor | None:
        value = self.named[name]
        return None if value is None else constant_of(self.editor.gm, value)

    def _given(self, name: str) -> Tensor:
        found = self._constant(name)
        assert found is not None  # by schema
        return found

    def _flipped(self, value: Node) -> Node:
        return self._call(aten.flip.default, value, [0]) if self.named["is_reverse"] else value

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        place = self.node
        return self.editor.call(target, *args, like=place, before=place, **kwargs)


def _pack(weights: Sequence[tuple[Tensor, Tensor]], given: Sequence[Tensor | None]) -> Any:
    """The parameters of torch's integer cells: of the input and of the hidden state."""
    biases = [torch.zeros(len(weights[0][1])) if bias is None else bias for bias in given]
    quantized: Any = torch.ops.quantized
    with _engine("fbgemm"):
        packed = [
            quantized.linear_prepack(_quantized(*weight), bias)
            for weight, bias in zip(weights, biases, strict=True)
        ]
        return quantized.make_quantized_cell_params_dynamic(*packed, *biases, False)


def _quantized(integers: Tensor, scale: Tensor) -> Tensor:
    """A quantized tensor, which packing takes; torch 2.13 deprecates those, not the cells."""
    zeros = torch.zeros(len(scale), dtype=torch.long)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".*quantized tensor creation", category=UserWarning
        )
        return torch._make_per_channel_quantized_tensor(integers, scale.double(), zeros, 0)


@contextmanager
def _engine(name: str) -> Iterator[None]:
    """Pack for this library, whatever the user's choice for modules of their own is."""
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = name
    try:
        yield
    finally:
        torch.backends.quantized.engine = before
